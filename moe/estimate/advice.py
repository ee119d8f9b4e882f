"""What to change when a run does not fit: overrides tried one by one, and what each comes to."""

import copy
from collections.abc import Iterator
from typing import Any

from configs.knobs import put, written
from configs.layout import expert_parallel_size
from configs.machines import Machine
from configs.schema import Config
from configs.validate import ConfigError, validate
from moe.estimate.memory import exchange_bytes, stage_memory
from moe.estimate.resolve import resolved


def needed(cfg: Config, world: int) -> int:
    """Bytes of the worst rank: torch's allocations and exchange buffers."""
    return max(m.peak for m in stage_memory(cfg, world)) + exchange_bytes(cfg, world)


def suggestions(cfg: Config, world: int, machine: Machine) -> list[tuple[str, int]]:
    """(overrides, bytes needed with them) of each change that helps, the least needed first.

    Args:
        cfg: as given, with `auto` in it.
        world: ranks.
        machine: decides what `auto` takes.
    """
    before = needed(resolved(cfg, world, machine.node_gpus), world)
    found: dict[str, int] = {}
    for changes in _changes(cfg, world):
        changed = copy.deepcopy(cfg)
        for path, value in changes.items():
            put(changed, path, value)
        ranks = changed.parallel.world_size or world
        try:
            validate(changed, ranks)
            after = needed(resolved(changed, ranks, machine.node_gpus), ranks)
        except ConfigError:
            continue
        if after < 0.99 * before:
            found[" ".join(f"{path}={written(value)}" for path, value in changes.items())] = after
    return sorted(found.items(), key=lambda item: item[1])


def _changes(cfg: Config, world: int) -> Iterator[dict[str, Any]]:
    p, d = cfg.parallel, cfg.data
    even = {"parallel.pipeline_layout": "", "parallel.virtual_pipeline": 1}
    expert = expert_parallel_size(cfg, world)
    yield {"data.micro_batch": max(1, d.micro_batch // 2)}
    yield {"run.recompute": "moe"}
    yield {"run.recompute": "full"}
    yield {"parallel.distributed_optimizer": True}
    yield {"parallel.grad_dtype": "bf16"}
    yield {"optim.moments": "bf16"}
    yield {"parallel.expert": 2 * expert}
    yield {"parallel.tensor": 2 * p.tensor}
    yield {"parallel.context": 2 * p.context}
    for stages in (2 * p.pipeline, 4 * p.pipeline):
        yield {"parallel.pipeline": stages} | even
    yield {"parallel.world_size": 2 * world}
    yield {"run.recompute": "full", "parallel.grad_dtype": "bf16"}
    yield {"run.recompute": "full", "parallel.expert": 2 * expert}
