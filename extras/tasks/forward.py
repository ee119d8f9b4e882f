"""Forward passes of rows: over the ranks of a run, or by the model of a checkpoint.

In a run the passes have the tokens of a micro-batch of training, as more and shorter sequences: all
buffers of experts and exchanges keep their sizes, and short rows are not filled up to the length of
training. All ranks run the same passes, of which each data parallel rank has a share of the rows.

Legend: B sequences, S tokens of each, N tokens with a label, K alternatives of labels, V vocabulary
of a rank.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.schema import Config
from phalanx.extras.tasks.metrics import Likelihood
from phalanx.extras.tasks.requests import Row
from phalanx.moe.labels import Batch
from phalanx.moe.run.step import Step
from phalanx.parallel.dispatcher.capacity import Growth
from phalanx.parallel.engine import sum_over_world

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor

_CHUNK = 1024  # tokens whose logits are fp32 at a time
_GPU_TILE = 128  # sequences of a GPU are of full tiles, so that kernels meet few shapes


class Scored(NamedTuple):
    """Results of a row."""

    alternatives: list[Likelihood]
    token: int  # most likely one in place of the label, of a row with one label


Forward = Callable[[Sequence[Row]], list[Scored]]
"""Results of rows, in their order and the same on all ranks. Collective."""


class RunForward:
    """Forward passes on the layout of a run, whose model is in evaluation mode.

    `reruns`: passes that were repeated with larger buffers.
    """

    def __init__(self, cfg: Config, step: Step) -> None:
        self._cfg, self._step, self._job = cfg, step, step.job
        self.reruns: list[Growth] = []
        groups, on_gpu = self._job.groups, self._job.runtime.device.type == "cuda"
        # Sequence parallel ranks have equal parts of a sequence, context parallel ones two each.
        parts = groups.tensor * (2 * groups.context if groups.context > 1 else 1)
        self._tile = math.lcm(_GPU_TILE if on_gpu else 1, parts)
        self._calls = groups.pipeline  # micro-batches of a pass, which fill the stages

    def __call__(self, rows: Sequence[Row]) -> list[Scored]:
        return _in_passes(rows, self._most, self._pass)

    def _most(self, longest: int) -> int:
        """Rows of a pass."""
        return self._shape(longest)[1] * self._calls * self._job.groups.data

    def _shape(self, longest: int) -> tuple[int, int]:
        """Length and number of the sequences of a micro-batch, for rows of so many tokens."""
        length, sequences = self._cfg.data.sequence_length, self._cfg.data.micro_batch
        while length // 2 >= longest and length % (2 * self._tile) == 0:
            length, sequences = length // 2, sequences * 2
        return length, sequences

    def _pass(self, rows: Sequence[Row]) -> list[Scored]:
        """Results of rows, of which the first is the longest."""
        step, job = self._step, self._job
        length, sequences = self._shape(len(rows[0].inputs))
        per_rank, kinds = sequences * self._calls, max(len(row.labels_KN) for row in rows)
        first = job.groups.data_rank * per_rank
        own = rows[first : first + per_rank]
        parts = [own[i * sequences : (i + 1) * sequences] for i in range(self._calls)]
        inputs = [
            step.context_shard(batch_of(part, rows, length, sequences, kinds)) for part in parts
        ]

        def report(logits_BSV: Tensor, batch: Batch) -> dict[str, Tensor]:
            return {"scores": row_scores(logits_BSV, batch, kinds, job.groups.pg.tp)}

        while True:
            size = dict(sequence=length, micro_batch=sequences)
            reports = step.report_logits(inputs, report, **size)
            total = torch.zeros(
                per_rank * job.groups.data,
                2 * kinds + 1,
                dtype=torch.float64,
                device=job.runtime.device,
            )
            if reports and job.groups.pg.tp.rank() == 0:
                found = torch.cat([report["scores"] for report in reports])
                total[first : first + per_rank] = found
            numbers = sum_over_world(total).tolist()
            if not job.budget.exceeded(job.budget.record(dist.group.WORLD).tolist()):
                return [_scored(row, values) for row, values in zip(rows, numbers, strict=False)]
            self.reruns += step.enlarge()


def checkpoint_forward(
    predictor: "Predictor", tokens: int, progress: Callable[[int], object]
) -> Forward:
    """Forward passes by the model of a checkpoint, of at most so many `tokens` or one row.

    `progress` is called with the number of rows of each pass.
    """

    def of_pass(rows: Sequence[Row]) -> list[Scored]:
        kinds = max(len(row.labels_KN) for row in rows)
        inputs = batch_of(rows, rows, len(rows[0].inputs), len(rows), kinds)
        logits_BSV = predictor.logits(inputs["tokens"])
        inputs = {name: t.to(logits_BSV.device) for name, t in inputs.items()}
        numbers = row_scores(logits_BSV, inputs, kinds, None).tolist()
        progress(len(rows))
        return [_scored(row, values) for row, values in zip(rows, numbers, strict=True)]

    return lambda rows: _in_passes(rows, lambda longest: max(1, tokens // longest), of_pass)


def _in_passes(rows: Sequence[Row], most: Callable[[int], int], of_pass: Forward) -> list[Scored]:
    """Results of rows, in their order, from passes of rows of like lengths, the longest first.

    `most`: rows of a pass, by the tokens of the longest.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].inputs))
    found: dict[int, Scored] = {}
    while order:
        count = most(len(rows[order[0]].inputs))
        some, order = order[:count], order[count:]
        found |= zip(some, of_pass([rows[i] for i in some]), strict=True)
    return [found[i] for i in range(len(rows))]


def batch_of(
    rows: Sequence[Row], others: Sequence[Row], length: int, sequences: int, kinds: int
) -> Batch:
    """Rows as a micro-batch, int64 and bool [B, S]; what they leave free has text of `others`.

    No earlier token depends on what follows a row, and tokens that are all equal would choose the
    same experts.
    """
    text = np.concatenate([np.array(row.inputs, np.int64) for row in others])
    tokens_BS = np.resize(text, (sequences, length))
    scored_BS = np.zeros((sequences, length), bool)
    labels_KBS = np.zeros((kinds, sequences, length), np.int64)
    for i, row in enumerate(rows):
        stop = len(row.inputs)
        tokens_BS[i, :stop] = row.inputs
        for k, labels in enumerate(row.labels_KN):
            labels_KBS[k, i, stop - len(labels) : stop] = labels
        scored_BS[i, stop - len(row.labels_KN[0]) : stop] = True
    named = {f"labels_{k}": torch.from_numpy(each) for k, each in enumerate(labels_KBS)}
    position_BS = torch.arange(length).expand(sequences, length).contiguous()
    tokens = {"tokens": torch.from_numpy(tokens_BS), "position_ids": position_BS}
    return {**tokens, "scored": torch.from_numpy(scored_BS), **named}


def row_scores(
    logits_BSV: Tensor, batch: Batch, kinds: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Sums over the labels of each row, fp64 [B, 2 K + 1].

    By alternative the cross entropy and the number of labels that are not the most likely token;
    then the most likely tokens. The `group` splits the vocabulary; None: it is whole.
    """
    scored_BS = batch["scored"]
    logits_NV = logits_BSV[scored_BS]
    labels_NK = torch.stack([batch[f"labels_{k}"][scored_BS] for k in range(kinds)], 1)
    row_N = scored_BS.nonzero()[:, 0]
    sums = torch.zeros(len(scored_BS), 2 * kinds + 1, dtype=torch.float64, device=logits_BSV.device)
    for some in torch.arange(len(row_N), device=row_N.device).split(_CHUNK):
        nats_NK, token_N1 = token_scores(logits_NV[some], labels_NK[some], group)
        wrong_NK = labels_NK[some] != token_N1
        values = torch.cat((nats_NK.double(), wrong_NK.double(), token_N1.double()), 1)
        # A product, whose sums have a fixed order; those of index_add_ have none on a GPU.
        rows_NB = torch.nn.functional.one_hot(row_N[some], len(sums)).double()
        sums += rows_NB.t() @ values
    return sums


def token_scores(
    logits_NV: Tensor, labels_NK: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of labels, fp32 [N, K], and the most likely tokens, int64 [N, 1]."""
    logits_NV = logits_NV.float()
    V = logits_NV.size(1)
    split = group is not None and group.size() > 1
    first = dist.get_rank(group) * V if split else 0
    most_N1, best_N1 = logits_NV.max(1, keepdim=True)
    token_N1, top_N1 = best_N1 + first, most_N1
    if split:
        top_N1 = most_N1.clone()
        dist.all_reduce(top_N1, op=dist.ReduceOp.MAX, group=group)
        token_N1 = token_N1.where(most_N1 == top_N1, torch.iinfo(torch.int64).max)
        dist.all_reduce(token_N1, op=dist.ReduceOp.MIN, group=group)  # the first of equal ones
    total_N1 = (logits_NV - top_N1).exp().sum(1, keepdim=True)
    local_NK = labels_NK - first
    inside_NK = (local_NK >= 0) & (local_NK < V)
    hit_NK = logits_NV.gather(1, local_NK.clamp(0, V - 1)).where(inside_NK, 0.0)
    if split:
        sums = torch.cat((total_N1, hit_NK), 1)
        dist.all_reduce(sums, group=group)
        total_N1, hit_NK = sums[:, :1], sums[:, 1:]
    return top_N1 + total_N1.log() - hit_NK, token_N1


def _scored(row: Row, values: Sequence[float]) -> Scored:
    kinds = (len(values) - 1) // 2
    pairs = zip(values[:kinds], values[kinds : 2 * kinds], strict=True)
    found = [Likelihood(-nats, not wrong) for nats, wrong in pairs]
    token = values[-1] if len(row.labels_KN[0]) == 1 else -1
    return Scored(found[: len(row.labels_KN)], int(token))
