"""Train a small model on the ranks of `run_distributed`, and bring everything back to compare.

`train` runs inside a rank: it builds the job of a config as the trainer does and takes its optimizer
steps. `trained` calls it on all ranks and joins their shards to the tensors of the whole model, by
checkpoint key: names, shapes and values that no longer know the layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.distributed import run_distributed


class Shard(NamedTuple):
    """One rank's part of a tensor of the model."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    data: Tensor


class Trained(NamedTuple):
    """What a run was, on any layout."""

    losses: list[float]
    """Mean next-token loss of every step."""
    mtp_losses: list[float]
    """Mean multi-token-prediction loss of every step; 0 without it."""
    norms: list[float]
    """Gradient norm of every step."""
    loads: list[dict[int, float]]
    """Load of the busiest expert of every layer, of every step."""
    balance: list[dict[str, float]]
    """Balancing losses of every step."""
    reruns: int
    before: dict[str, Tensor]
    """The whole model before the first step: parameters and saved buffers by checkpoint key."""
    after: dict[str, Tensor]


@dataclass
class Text:
    """Rows of random tokens that repeat after `rows`, so that a few steps can learn them."""

    vocabulary: int
    length: int
    rows: int = 8
    fingerprint: str = "text"

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> np.ndarray:
        draw = np.random.default_rng(index % self.rows)
        return draw.integers(self.vocabulary, size=self.length + 1)


def train(overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """Take `steps` optimizer steps of the run that `overrides` describe, on this rank."""
    from configs.load import load
    from configs.validate import validate
    from parallel.runtime import start

    cfg = load([*overrides, "run.device=cpu", "data=synthetic"])
    runtime = start(seed=cfg.run.seed, timeout=60, deterministic=False)
    validate(cfg, runtime.world)
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from moe import balance
    from moe.data import Loader
    from moe.setup import setup

    MTPLossLoggingHelper.clean_metrics_in_tracker()
    job = setup(cfg, runtime)
    engine, data = job.engine, cfg.data
    text = Text(cfg.model.vocab_size, data.sequence_length)
    loader = Loader(
        text, data.micro_batch, data.global_batch, job.groups.data_rank, job.data_parallel
    )
    before = shards(job)
    record: dict[str, Any] = dict(losses=[], mtp_losses=[], norms=[], loads=[], balance=[])
    engine.train()
    for _ in range(steps):
        loss, mtp_loss = _step(job, loader.next_step())
        record["losses"].append(loss)
        record["mtp_losses"].append(mtp_loss)
        record["norms"].append(engine.step())
        seen = balance.collect(engine.modules, engine.config, job.groups.pg)
        balance.reset(engine.modules)
        record["loads"].append(seen.load)
        record["balance"].append(seen.losses)
    loader.close()
    return record | dict(reruns=job.budget.reruns, before=before, after=shards(job))


def _step(job: Any, batches: list[dict[str, Tensor]]) -> tuple[float, float]:
    """Forward and backward of one step, again while the budget overflows: (loss, MTP loss)."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.utils import get_batch_on_this_cp_rank

    from moe import balance
    from parallel.engine import sum_over_world

    engine, data = job.engine, job.cfg.data

    def forward_step(batches: Any, chunk: torch.nn.Module) -> Any:
        batch = next(batches)
        if job.groups.context > 1:
            batch = get_batch_on_this_cp_rank(batch, False, job.groups.pg.cp)
        return chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), report

    def report(loss_BS: Tensor) -> Any:
        count = torch.tensor(loss_BS.numel(), dtype=torch.int32)
        return loss_BS.sum(), count, {"loss": loss_BS.detach().double().mean()}

    before = balance.snapshot(engine.modules)
    while True:
        engine.zero_grad()
        reports = engine.forward_backward(
            forward_step,
            [iter(batches) for _ in engine.chunks],
            microbatches=len(batches),
            sequence=data.sequence_length,
            micro_batch=data.micro_batch,
        )
        totals = torch.zeros(3, dtype=torch.float64)
        if reports:
            totals[0] = torch.stack([r["loss"] for r in reports]).mean()
            totals[1] = 1
            if (mtp := MTPLossLoggingHelper.tracker.get("loss_values")) is not None:
                totals[2] = mtp.mean() / len(reports)
                MTPLossLoggingHelper.clean_metrics_in_tracker()
        loss, ranks, mtp_loss = sum_over_world(totals).tolist()
        if not job.budget.overflowed(torch.distributed.group.WORLD):
            return loss / ranks, mtp_loss / ranks
        job.budget.grow()
        balance.restore(engine.modules, before)


def shards(job: Any) -> list[Shard]:
    """Copies of this rank's parameters and saved buffers."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from parallel.model_state import parameters_gathered, sharded_state

    def parts(values: Any) -> Any:
        for value in values:
            if isinstance(value, ShardedTensorFactory):
                yield from parts(nested_values(value.build()))
            elif isinstance(value, ShardedTensor):
                yield value

    with parameters_gathered(job.engine.chunks):
        state = sharded_state(job.engine.chunks, job.groups.pg.dp_cp)
        return [
            Shard(p.key, tuple(p.global_shape), tuple(p.global_offset), p.data.detach().clone())
            for p in parts(nested_values(state))
        ]


def joined(ranks: Sequence[Sequence[Shard]]) -> dict[str, Tensor]:
    """Whole tensors by key. What several ranks hold must be bitwise the same on all of them."""
    whole: dict[str, Tensor] = {}
    for rank, parts in enumerate(ranks):
        for key, shape, offset, data in parts:
            tensor = whole.setdefault(key, torch.full(shape, torch.nan, dtype=torch.float64))
            assert tensor.shape == shape, f"{key}: {tuple(tensor.shape)} and {shape}"
            data = data.double().reshape((1,) * (len(shape) - data.dim()) + tuple(data.shape))
            place = tensor[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))]
            known = ~place.isnan()
            assert torch.equal(place[known], data[known]), f"rank {rank} has another {key}"
            place.copy_(data)
    holes = [key for key, tensor in whole.items() if tensor.isnan().any()]
    assert not holes, f"no rank holds the whole of {holes}"
    return whole


def trained(world: int, overrides: Sequence[str], steps: int) -> Trained:
    """The run of `overrides` on `world` ranks; what every rank reports must be the same."""
    ranks = run_distributed(train, world, list(overrides), steps)
    states = {name: joined([rank.pop(name) for rank in ranks]) for name in ("before", "after")}
    for rank in ranks[1:]:
        assert rank == ranks[0]
    return Trained(**ranks[0], **states)
