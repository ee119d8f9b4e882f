"""Text from the model in training, greedy, on the layout of the run.

For every token all ranks run the forward pass of one micro-batch, of the shape of training, whose
first tokens are the text so far. The other tokens are a row of the data: no earlier token depends
on them, and equal tokens would all choose the same experts. Each rank proposes the best token of
its part of the vocabulary and of the sequence; the best of all ranks is the next token.

Legend: B sequences, S tokens of a sequence, V vocabulary, in `Samples` of this rank.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from phalanx.configs.schema import Config
from phalanx.moe.data.packing import pieces
from phalanx.moe.data.tokenizer.codec import codec_of_run
from phalanx.moe.labels import Batch
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.run.callbacks.callback import Callback
from phalanx.moe.run.step import Step
from phalanx.parallel.dispatcher.capacity import Growth
from phalanx.parallel.fault.activity import set_activity


def generate(
    next_token: Callable[[list[int]], int],
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """At most `count` tokens after a prompt of at least one, each as soon as it is known.

    Args:
        next_token: chooses the token after its argument, at most `context` last tokens.
        ends: tokens that end a text; they are not yielded.
    """
    ids = list(prompt)
    for _ in range(count):
        token = next_token(ids[-context:])
        if token in ends:
            return
        ids.append(token)
        yield token


LENGTH = 64  # largest number of new tokens of a sample
PROMPT = 32  # largest number of tokens of the prompt, which is at most half of a sequence


class SampleText(Callback):
    """Samples of text as events, after every `run.sample_every` steps."""

    def __init__(self, every: int, samples: "Samples", metrics: Metrics) -> None:
        super().__init__(every)
        self._samples, self._metrics = samples, metrics

    def __call__(self, step: int) -> None:
        set_activity(f"step {step}: sample")
        with record_function("sample"):
            sample, reruns = self._samples()
        self._metrics.reruns(reruns, f"the sample after step {step}")
        title = f"sample after step {step}"
        if sample is None:
            self._metrics.event(f"{title}: none, as the model's logits are NaN or infinite")
        else:
            self._metrics.event(title, shown=str(sample), **asdict(sample))
        self._metrics.clock.lap("samples")


class _NotFinite(Exception):
    """The logits of a token are NaN or infinite."""


@dataclass(frozen=True)
class Sample:
    """A prompt and the model's continuation."""

    before: str
    after: str

    def __str__(self) -> str:
        """Both for a console: each line behind a mark, with control characters as escapes."""
        return f"{_marked(self.before)}\n   continued\n{_marked(self.after)}"


def _marked(text: str) -> str:
    plain = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return "\n".join(f"   | {line}" for line in "".join(plain).split("\n"))


class Samples:
    """Generator of samples of a job.

    Args:
        row: tokens of the data, int64, at least [S]; their start is the prompt.
        position: position of each token in its piece of a document, in a run whose documents do not
            attend to each other; the start of the longest piece is then the prompt.

    Raises:
        DataError: the tokenizer of the data is unknown.
    """

    def __init__(
        self, cfg: Config, step: Step, row: Tensor, position: np.ndarray | None = None
    ) -> None:
        self._cfg, self._step, self._job = cfg, step, step.job
        S = cfg.data.sequence_length
        self._row_S, available = row[:S], S
        if position is not None:
            lengths = pieces(position[:S])
            longest = int(lengths.argmax())
            self._row_S = self._row_S.roll(-int(lengths[:longest].sum()))
            available = int(lengths[longest]) - 1  # without the end of the document
        self._prompt = self._row_S[: max(1, min(PROMPT, S // 2, available))].tolist()
        self._codec = codec_of_run(cfg)
        self._reruns: list[Growth] = []

    def __call__(self) -> tuple[Sample | None, list[Growth]]:
        """A sample, or None if logits are NaN or infinite, and the repeated forward passes.

        Collective. The model is in training mode before and after the call.
        """
        engine, S = self._job.engine, len(self._row_S)
        prompt, self._reruns = self._prompt, []
        sample = None
        engine.eval()
        with torch.no_grad(), contextlib.suppress(_NotFinite):  # on all ranks
            ids = list(generate(self._next, prompt, LENGTH, context=S, ends=self._codec.ends))
            sample = Sample(self._codec.decode(prompt), self._codec.continuation(prompt, ids))
        engine.train()
        return sample, self._reruns

    def _next(self, ids: list[int]) -> int:
        """The most likely token after `ids`, at most S; the same on every rank."""
        job = self._job
        row_S = self._row_S.clone()
        row_S[: len(ids)] = torch.tensor(ids)
        shape = self._cfg.data.micro_batch, len(row_S)
        rows = {"tokens": row_S, "position_ids": torch.arange(len(row_S))}
        whole = {name: x_S.expand(shape).contiguous() for name, x_S in rows.items()}
        inputs = self._step.context_shard(whole)
        positions = inputs["position_ids"][0].tolist()
        index = positions.index(len(ids) - 1) if len(ids) - 1 in positions else None
        while True:
            best = self._best(inputs, index)
            if not job.budget.exceeded(job.budget.record(dist.group.WORLD).tolist()):
                return best
            self._reruns += self._step.enlarge()

    def _best(self, inputs: Batch, index: int | None) -> int:
        """Best token at an index of this rank's part; None if another rank has the position."""
        job, S, B = self._job, len(self._row_S), self._cfg.data.micro_batch
        # An interleaved schedule needs a multiple of its stages.
        count = job.groups.pipeline if job.groups.virtual_pipeline > 1 else 1

        def report(logits_BSV: Tensor, _: Batch) -> dict[str, Tensor]:
            return {} if index is None else {"logits": logits_BSV[0, index].clone()}

        reports = self._step.report_logits([inputs] * count, report, sequence=S, micro_batch=B)
        local = torch.tensor([-math.inf, 0.0], dtype=torch.float64, device=job.runtime.device)
        if reports and index is not None:
            logits_V = reports[0]["logits"].double()
            first = job.groups.pg.tp.rank() * len(logits_V)
            local = torch.stack((logits_V.max(), logits_V.argmax() + first))
            if not logits_V.isfinite().all():
                local[0] = math.nan
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local)
        candidates = torch.stack(gathered).tolist()
        if any(math.isnan(value) for value, _ in candidates):
            raise _NotFinite
        return -int(max((value, -token) for value, token in candidates)[1])
