"""Train a small model on the ranks of `run_distributed`, and bring everything back to compare.

`trained` runs the real `Trainer` and joins the shards of all ranks to the tensors of the whole
model, by checkpoint key: names, shapes and values that no longer know the layout.
"""

import contextlib
import copy
import functools
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import megatron.core.distributed  # noqa: F401  (imported once for all ranks, which are forked)
import megatron.core.models.gpt.gpt_model  # noqa: F401
import torch
from torch import Tensor

from configs.knobs import put
from configs.load import load
from configs.schema import Config
from configs.validate import validate
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

    steps: list[dict[str, float]]
    """The trainer's record of every step: loss, grad_norm, balance/..., reruns."""
    valid_loss: float
    """After the last step."""
    before: dict[str, Tensor]
    """The whole model before the first step: parameters and saved buffers by checkpoint key."""
    after: dict[str, Tensor]

    def series(self, name: str) -> list[float]:
        """One entry of every step's record."""
        return [step[name] for step in self.steps]


def trained(
    world: int, overrides: Sequence[str], changes: Mapping[str, Any] | None = None
) -> Trained:
    """A run on `world` ranks, from scratch, on synthetic tokens, never saved.

    Args:
        world: ranks.
        overrides: of the configuration, as on a command line.
        changes: values of knobs by dotted path, on top; cheaper than overrides.
    """
    cfg = copy.deepcopy(_loaded(*overrides))
    for path, value in (changes or {}).items():
        put(cfg, path, value)
    cfg.run.eval_interval, cfg.run.eval_batches = cfg.run.steps, 1
    validate(cfg, world)
    ranks = run_distributed(_train, world, cfg, timeout=300)
    records = ranks[0].records
    before, after = (
        joined([getattr(rank, when) for rank in ranks]) for when in ("before", "after")
    )
    (valid_loss,) = (r["valid_loss"] for r in records if "valid_loss" in r)
    return Trained([r for r in records if "grad_norm" in r], valid_loss, before, after)


@functools.cache
def _loaded(*overrides: str) -> Config:
    return load([*overrides, "run.device=cpu", "run.save_interval=-1", "data=synthetic"])


class _Rank(NamedTuple):
    records: list[dict[str, float]]
    """On rank 0."""
    before: list[Shard]
    after: list[Shard]


def _train(cfg: Config) -> _Rank:
    from parallel.runtime import start
    from parallel.signals import StopSignal

    runtime = start(seed=cfg.run.seed, timeout=60, deterministic=False)
    from moe.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        cfg.run.dir = folder
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = Trainer(cfg, runtime, StopSignal())
            before = _shards(trainer.job)
            trainer.fit()
        journal = Path(folder, cfg.run.name, "metrics.jsonl")
        lines = journal.read_text().splitlines() if runtime.is_main else []
        return _Rank([json.loads(line) for line in lines], before, _shards(trainer.job))


def _shards(job: Any) -> list[Shard]:
    """Copies of this rank's parameters and saved buffers."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from parallel.model_state import parameters_gathered, sharded_state

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
    """Whole tensors by key; what several ranks hold must be bitwise the same on all of them."""
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
