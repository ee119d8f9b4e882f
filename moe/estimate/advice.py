"""What to change when a run does not fit: overrides, what each comes to, and which are enough."""

from collections.abc import Callable, Iterator
from typing import Any

from phalanx.configs.formats import is_fp8
from phalanx.configs.knobs import changed, get, overrides
from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.machines import Machine
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.estimate.memory import host_needed, needed
from phalanx.moe.estimate.modules import cheapest
from phalanx.moe.estimate.resolve import resolved
from phalanx.moe.estimate.rows import largest_factor

_MOST_TOGETHER = 5
"""Overrides in one suggestion."""

_FEW = 2
"""Single overrides that are enough, below which several together are looked for."""

Changes = dict[str, Any]
"""Values by knob."""

Need = Callable[[Config, int], int]
"""Bytes that a valid configuration needs on a number of ranks."""


def suggestions(cfg: Config, world: int, machine: Machine, room: int) -> list[tuple[str, int]]:
    """(overrides, bytes needed with them), the least needed first.

    Those that are enough by themselves; if few are, a set of several that is; and more ranks, as
    many as it takes. If nothing is enough, what helps.

    Args:
        cfg: as given, with `auto` in it.
        world: ranks.
        machine: decides what `auto` takes.
        room: bytes that a rank may need.
    """

    def need(trial: Config, ranks: int) -> int:
        return needed(resolved(trial, ranks, machine.node_gpus), ranks)

    kinds = list(_layouts(cfg, world))
    known = resolved(cfg, world, machine.node_gpus)
    if known.kernels.backend != "megatron":  # which takes as many rows as come
        factor = largest_factor(known, world, room)
        if factor is not None and factor < cfg.parallel.capacity_factor:
            kinds.append([{"parallel.capacity_factor": factor}])
    found = _by_module(cfg, world, machine, need, room)
    if not found:
        kinds.append([{"run.recompute": ["full"], "run.offload": ["residual"]}])
    found += enough(cfg, world, need, room, kinds)
    found += enough(cfg, world, need, room, [[{"parallel.world_size": n} for n in _doubles(world)]])
    fit = [pair for pair in found if pair[1] <= room]
    return sorted(fit or found, key=lambda pair: pair[1])


def enough(
    cfg: Config, world: int, need: Need, room: int, kinds: list[list[Changes]]
) -> list[tuple[str, int]]:
    """As `suggestions`, of any need.

    Args:
        kinds: changes to choose from; of a kind, which begins with the least change, one is taken.
    """
    trial = _Trial(cfg, world, need)
    singly = [(pair, kind) for kind in kinds if (pair := trial.best(kind, {}, room)) is not None]
    helping = [pair for pair, _ in singly]
    found = [pair for pair in helping if pair[1] <= room]
    others = [kind for pair, kind in singly if pair[1] > room]
    if len(found) < _FEW and (together := _together(trial, others, room)):
        found.append(together)
    told = sorted(found or helping, key=lambda pair: pair[1])
    return [(overrides(changes), size) for changes, size in told]


_STATES: tuple[Changes, ...] = (
    {},
    {"optim.moments": "bf16"},
    {"optim.moments": "bf16", "parallel.grad_dtype": "bf16"},
)
"""What activations leave too little for, and what it may round, the less first."""


def _by_module(
    cfg: Config, world: int, machine: Machine, need: Need, room: int
) -> list[tuple[str, int]]:
    """The cheapest parts of layers to compute again or to move to host memory, if these are
    enough, or with what states of the optimizer take less."""
    known, before = resolved(cfg, world, machine.node_gpus), None
    for wanted in _STATES:
        states = {path: value for path, value in wanted.items() if get(cfg, path) != value}
        if states == before:
            continue
        before = states
        trial = _Trial(cfg, world, need)

        def fits(values: Changes, states: Changes = states, trial: _Trial = trial) -> bool:
            size = trial.size(states | values)
            return size is not None and size <= room and _hosts(cfg, world, values, machine)

        values = cheapest(known, world, machine, fits)
        if values is not None:
            changes = {k: v for k, v in (states | values).items() if get(cfg, k) != v}
            if changes == states:  # which are advice of their own
                return []
            size = trial.size(changes)
            assert size is not None
            return [(overrides(changes), size)]
    return []


def _hosts(cfg: Config, world: int, values: Changes, machine: Machine) -> bool:
    """Whether hosts have what is moved there."""
    if not values["run.offload"]:
        return True
    known = resolved(changed(cfg, values), world, machine.node_gpus)
    return host_needed(known, world) <= machine.host_room


class _Trial:
    """Bytes that changes of a configuration come to."""

    def __init__(self, cfg: Config, world: int, need: Need) -> None:
        self._cfg, self._world, self._need = cfg, world, need
        self.before = need(cfg, world)

    def best(self, kind: list[Changes], others: Changes, room: int) -> tuple[Changes, int] | None:
        """The first of a kind that is enough with `others`, or that which helps most; None if none
        helps by a hundredth."""
        sizes = [(others | changes, self.size(others | changes)) for changes in kind]
        known = [(changes, size) for changes, size in sizes if size is not None]
        before = self.size(others) or self.before
        helping = [pair for pair in known if pair[1] < 0.99 * before]
        if fit := [pair for pair in helping if pair[1] <= room]:
            return fit[0]
        return min(helping, key=lambda pair: pair[1], default=None)

    def size(self, changes: Changes) -> int | None:
        """Bytes; None for a configuration that is not valid."""
        trial = changed(self._cfg, changes)
        ranks = trial.parallel.world_size or self._world
        try:
            validate(trial, ranks)
            return self._need(trial, ranks)
        except ConfigError:
            return None


def _together(trial: _Trial, kinds: list[list[Changes]], room: int) -> tuple[Changes, int] | None:
    """Several changes that are enough: again and again the one that helps most."""
    chosen: Changes = {}
    left = list(kinds)
    for _ in range(_MOST_TOGETHER):
        tried = [(trial.best(kind, chosen, room), kind) for kind in left]
        helping = [(pair, kind) for pair, kind in tried if pair is not None]
        if not helping:
            return None
        (chosen, size), kind = min(helping, key=lambda item: item[0][1])
        left.remove(kind)
        if size <= room:
            return chosen, size
    return None


def _layouts(cfg: Config, world: int) -> Iterator[list[Changes]]:
    """What the same ranks can do, by kind."""
    p, d = cfg.parallel, cfg.data
    even = {"parallel.pipeline_layout": "", "parallel.virtual_pipeline": 1}
    yield [{"data.micro_batch": size} for size in halves(d.micro_batch)]
    yield [{"parallel.distributed_optimizer": True}]
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


def halves(size: int) -> list[int]:
    """Halves, quarters, ... down to 1."""
    return [size // 2**n for n in range(1, size.bit_length())]
