"""Train a small model on the ranks of `run_distributed`, and collect the results to compare.

`trained` runs the real `Trainer` and joins the shards of all ranks to full tensors by checkpoint
key: names, shapes and values that do not depend on the layout.
"""

import contextlib
import copy
import functools
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import megatron.core.distributed
import megatron.core.models.gpt.gpt_model  # noqa: F401
import torch
from torch import Tensor

from phalanx.configs.knobs import put
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from tests.support.distributed import run_distributed
from tests.support.runs import Change


class Shard(NamedTuple):
    """One rank's part of a tensor of the model."""

    key: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    data: Tensor


class Trained(NamedTuple):
    """Results of a run, independent of its layout."""

    steps: list[dict[str, float]]
    """The trainer's record of every step: loss, grad_norm, balance/..., reruns."""
    valid_losses: list[float]
    """Validation loss after every `run.eval_interval` steps."""
    before: dict[str, Tensor]
    """Parameters and saved buffers before the first step, by checkpoint key."""
    after: dict[str, Tensor]
    left: list[dict[str, str]]
    """Digests, on each rank, of the state that a step leaves for the next one, by name."""

    @property
    def valid_loss(self) -> float:
        """Validation loss after the last step."""
        return self.valid_losses[-1]

    def series(self, name: str) -> list[float]:
        """One entry of every step's record."""
        return [step[name] for step in self.steps]

    def has_weights_of(self, other: "Trained", change: float, weight: float = 3e-7) -> None:
        """Check the norm of differences: of a weight's change, plus some roundings of itself."""
        for key, expected in other.after.items():
            moved = (expected - other.before[key]).norm()
            error = (self.after[key] - expected).norm()
            assert error <= change * moved + weight * expected.norm(), f"{key}: {error / moved:.1e}"


def trained(
    world: int,
    overrides: Sequence[str],
    changes: Mapping[str, Any] | None = None,
    within: Change | None = None,
    node_ranks: int = 0,
) -> Trained:
    """Train on `world` ranks, from scratch, on synthetic tokens, without saving.

    Args:
        world: ranks.
        overrides: overrides as on a command line.
        changes: further values of knobs by dotted path; cheaper than overrides. Without
            `run.eval_interval` there is one validation, after the last step.
        within: context in which each rank trains.
        node_ranks: ranks of each pretended node; 0: one node has all.
    """
    cfg = copy.deepcopy(_loaded(*overrides))
    for path, value in (changes or {}).items():
        put(cfg, path, value)
    cfg.run.eval_interval, cfg.run.eval_batches = cfg.run.eval_interval or cfg.run.steps, 1
    validate(cfg, world)
    ranks = run_distributed(_train, world, cfg, within, node_ranks, timeout=300)
    records = ranks[0].records
    before, after = (
        joined([getattr(rank, when) for rank in ranks]) for when in ("before", "after")
    )
    valid_losses = [r["valid_loss"] for r in records if "valid_loss" in r]
    steps = [r for r in records if "grad_norm" in r]
    return Trained(steps, valid_losses, before, after, [rank.left for rank in ranks])


@functools.cache
def _loaded(*overrides: str) -> Config:
    return load([*overrides, "run.device=cpu", "run.save_interval=-1", "data=synthetic"])


class _Rank(NamedTuple):
    records: list[dict[str, float]]
    """Records of metrics.jsonl; only on rank 0."""
    before: list[Shard]
    after: list[Shard]
    left: dict[str, str]


def _train(cfg: Config, within: Change | None = None, node_ranks: int = 0) -> _Rank:
    with pretended_nodes(node_ranks):
        return _train_here(cfg, within)


@contextlib.contextmanager
def pretended_nodes(size: int) -> Iterator[None]:
    """Nodes of `size` ranks, in a rank that other tests use again; 0: one node."""
    if size:
        os.environ["PHALANX_NODE_GPUS"] = str(size)
    try:
        yield
    finally:
        os.environ.pop("PHALANX_NODE_GPUS", None)


def _train_here(cfg: Config, within: Change | None) -> _Rank:
    from phalanx.parallel.fault.signals import StopSignal
    from phalanx.parallel.runtime import start

    runtime = start(seed=cfg.run.seed, timeout=60, deterministic=False)
    from phalanx.moe.run.start import make_trainer

    with tempfile.TemporaryDirectory() as folder:
        cfg.run.dir = folder
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = make_trainer(cfg, runtime, StopSignal())
            before = _shards(trainer.job)
            with _inputs_watched(trainer.compute), (within or contextlib.nullcontext)(runtime.rank):
                trainer.fit()
        journal = Path(folder, cfg.run.name, "metrics.jsonl")
        lines = journal.read_text().splitlines() if runtime.is_main else []
        records = [json.loads(line) for line in lines]
        return _Rank(records, before, _shards(trainer.job), _left(trainer))


@contextlib.contextmanager
def _inputs_watched(compute: Any) -> Iterator[None]:
    """Fail if a step changes its micro-batches, which a rerun may need."""
    original = compute._microbatches

    def microbatches(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        before = [{name: tensor.clone() for name, tensor in batch.items()} for batch in inputs]
        reports = original(inputs, *args, **kwargs)
        for batch, copy_ in zip(inputs, before, strict=True):
            assert batch.keys() == copy_.keys()
            changed = [name for name in batch if not torch.equal(batch[name], copy_[name])]
            assert not changed, f"a step has changed its {changed}"
        return reports

    compute._microbatches = microbatches
    yield


def _left(trainer: Any) -> dict[str, str]:
    """Digests of the state on this rank that the next step starts from."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from phalanx.moe.router.balance import routers
    from phalanx.parallel import random_states as rng
    from phalanx.parallel.checkpoint.model_state import parameters_whole, sharded_state
    from phalanx.parallel.checkpoint.optimizer_state import OptimizerState

    engine = trainer.job.engine
    scalers = MoEAuxLossAutoScaler, MTPLossAutoScaler
    buffers = [b for c in engine.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    with parameters_whole(engine.chunks):
        state = sharded_state(engine.chunks, trainer.job.groups.pg.dp_cp)
        pieces = OptimizerState(engine.optimizer, state).shards.values()
        parameters = [p.detach().clone() for m in engine.modules for p in m.parameters()]
    left = {
        "parameters": parameters,
        "gradients": [buffer.grad_data for buffer in buffers],
        "optimizer": [piece.data for piece in pieces],
        "routers": [b for router in routers(engine.modules) for b in router.buffers()],
        "loss scales": [scaler.main_loss_backward_scale for scaler in scalers],
        "random states": rng.get(),
        "schedule": [engine.scheduler.num_steps, engine.lr],
        "data": trainer.data.loader.state_dict(),
        "health": trainer.progress.health.state_dict(),
    }
    return {name: digest(value) for name, value in left.items()}


def digest(value: Any) -> str:
    """Digest of the bits of nested tensors."""
    total = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            value = [*value.keys(), *value.values()]
        if isinstance(value, Tensor):
            data = value.detach().contiguous().view(-1).view(torch.uint8)
            total.update(str(value.shape).encode() + data.numpy().tobytes())
        elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
            for part in value:
                add(part)
        else:
            total.update(repr(value).encode())

    add(value)
    return total.hexdigest()


def _shards(job: Any) -> list[Shard]:
    """Copies of this rank's parameters and saved buffers."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from phalanx.parallel.checkpoint.model_state import parameters_gathered, sharded_state

    def parts(values: Any) -> Iterator[Any]:
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
    """Full tensors by key; replicated parts must be bitwise equal on all ranks."""
    whole: dict[str, Tensor] = {}
    for rank, shards in enumerate(ranks):
        for key, shape, offset, data in shards:
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
