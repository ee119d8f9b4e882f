"""Overrides for a run: those with which it fits, and knobs that cost accuracy or memory.

Everything that costs neither is on by default or with `auto`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.configs.formats import is_fp8
from phalanx.configs.knobs import Changes, changed, get, overrides
from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.capabilities import ZERO3
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import ConfigError, validate
from phalanx.extras.planner.memory_options import cheapest
from phalanx.moe.plan.cost.stages import host_needed, largest_factor, needed
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved
from phalanx.moe.plan.remedies import Need, Trial, enough, halvings


@dataclass(frozen=True)
class Suggestion:
    """Overrides that reduce memory."""

    overrides: str
    size: int  # bytes that the worst rank needs with them
    tokens: float  # expected tokens a second and GPU


def suggestions(cfg: Config, world: int, machine: Machine, available: int) -> list[Suggestion]:
    """Overrides that are enough, the fastest first.

    Overrides that are enough alone; if there are few, a set of several that is enough; and a
    larger number of ranks. If nothing is enough, overrides that reduce memory. The `machine`
    decides the values of `auto`; a rank may need `available` bytes.
    """

    def need(trial: Config, ranks: int) -> int:
        return needed(resolved(trial, ranks, machine.node_gpus), ranks)

    kinds = list(_layouts(cfg, world))
    known = resolved(cfg, world, machine.node_gpus)
    if expert_backend(known.kernels.backend).row_budget:
        factor = largest_factor(known, world, available)
        if factor is not None and factor < cfg.parallel.capacity_factor:
            kinds.append([{"parallel.capacity_factor": factor}])
    pairs = _by_module(cfg, world, machine, need, available)
    if not pairs:
        kinds.append([{"run.recompute": ["full"], "run.offload": ["residual"]}])
    pairs += enough(cfg, world, need, available, kinds)
    more_ranks: list[Changes] = [{"parallel.world_size": n} for n in _doubles(world)]
    pairs += enough(cfg, world, need, available, [more_ranks])
    fit = [pair for pair in pairs if pair[1] <= available]
    found = [
        Suggestion(overrides(changes), size, _rate(changed(cfg, changes), world, machine))
        for changes, size in fit or pairs
    ]
    return sorted(found, key=lambda each: (-each.tokens, each.size))


def _rate(cfg: Config, world: int, machine: Machine) -> float:
    ranks = cfg.parallel.world_size or world
    seconds = step_time(resolved(cfg, ranks, machine.node_gpus), ranks, machine).total
    return cfg.data.global_batch * cfg.data.sequence_length / ranks / seconds


_STATES: tuple[Changes, ...] = (
    {},
    {"optim.moments": "bf16"},
    {"optim.moments": "bf16", "parallel.grad_dtype": "bf16"},
)  # smaller optimizer states to combine with recomputation, the least rounding first


def _by_module(
    cfg: Config, world: int, machine: Machine, need: Need, available: int
) -> list[tuple[Changes, int]]:
    """The cheapest parts of layers to recompute or offload that are enough.

    With smaller states of the optimizer if nothing is enough otherwise; empty if nothing is then.
    """
    known, before = resolved(cfg, world, machine.node_gpus), None
    for wanted in _STATES:
        states = {path: value for path, value in wanted.items() if get(cfg, path) != value}
        if states == before:
            continue
        before = states
        trial = Trial(cfg, world, need)

        def fits(values: Changes, states: Changes = states, trial: Trial = trial) -> bool:
            size = trial.size(states | values)
            return (
                size is not None and size <= available and _fits_host(cfg, world, values, machine)
            )

        values = cheapest(known, world, machine, fits)
        if values is not None:
            changes = {k: v for k, v in (states | values).items() if get(cfg, k) != v}
            if changes == states:  # suggested separately
                return []
            size = trial.size(changes)
            assert size is not None
            return [(changes, size)]
    return []


def _fits_host(cfg: Config, world: int, values: Changes, machine: Machine) -> bool:
    """True if host memory suffices for what is offloaded."""
    if not values["run.offload"]:
        return True
    known = resolved(changed(cfg, values), world, machine.node_gpus)
    return host_needed(known, world) <= machine.host_room


def _layouts(cfg: Config, world: int) -> Iterator[list[Changes]]:
    """Groups of alternative changes with the same number of ranks."""
    p, d = cfg.parallel, cfg.data
    even = {"parallel.pipeline_layout": "", "parallel.virtual_pipeline": 1}
    yield [{"data.micro_batch": size} for size in halvings(d.micro_batch)]
    yield [{"parallel.distributed_optimizer": kind} for kind in (True, *ZERO3)]
    if p.delay_wgrad != "off":
        yield [{"parallel.delay_wgrad": "off"}]
    yield [{"parallel.grad_dtype": "bf16"}]
    yield [{"optim.moments": "bf16"}]
    if is_fp8(cfg):
        yield [{"precision.weights": "scratch"}]
        yield [{"precision.hidden": "fp8"}]
    yield [{"parallel.expert": size} for size in _doubles(expert_parallel_size(cfg, world))]
    yield [{"parallel.tensor": size} for size in _doubles(p.tensor)]
    yield [{"parallel.context": size} for size in _doubles(p.context)]
    yield [{"parallel.pipeline": stages} | even for stages in _doubles(p.pipeline)]


def _doubles(size: int) -> list[int]:
    return [2 * size, 4 * size, 8 * size]


_ROOMY = 2.0  # capacity factor of the records with natural routing


def opt_ins(
    cfg: Config, world: int, machine: Machine, available: int
) -> Iterator[tuple[str, int, str]]:
    """(override, change of a rank's bytes, effect) of overrides that are valid and fit."""
    before = needed(resolved(cfg, world, machine.node_gpus), world)
    for path, value, effect in _candidates(cfg):
        trial = changed(cfg, {path: value})
        try:
            validate(trial, world)
            size = needed(resolved(trial, world, machine.node_gpus), world)
        except ConfigError:
            continue
        if size != before and size <= available:
            yield overrides({path: value}), size - before, effect


def _candidates(cfg: Config) -> Iterator[tuple[str, Any, str]]:
    if cfg.optim.moments == "fp32":
        yield "optim.moments", "bf16", "rounds the moments of the optimizer"
    if cfg.parallel.grad_dtype == "fp32":
        yield "parallel.grad_dtype", "bf16", "rounds sums of gradients, and halves their traffic"
    if cfg.parallel.capacity_factor < _ROOMY:
        yield "parallel.capacity_factor", _ROOMY, "fewer steps rerun under uneven routing"
    if is_fp8(cfg) and cfg.precision.hidden == "bf16":
        yield "precision.hidden", "fp8", "rounds the inputs of activation gradients"
    yield "data.micro_batch", 2 * cfg.data.micro_batch, "fewer and larger kernels"
