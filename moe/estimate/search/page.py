"""The page of `run.dry_run=search`: the best layouts with their memory and commands."""

import shlex
from collections.abc import Iterator, Sequence

from phalanx.configs import programs
from phalanx.configs.arithmetic.accounting import flops_per_token
from phalanx.configs.formats import described, is_fp8
from phalanx.configs.knobs import Changes, changed, overrides
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES, Machine
from phalanx.moe.estimate.search.best import Found, best, estimated
from phalanx.moe.report.units import model_size, storage

WITH_PRECISION = "search_precision"
"""Value of `run.dry_run` that compares bf16 with FP8."""
_SHOWN = 5


def search_page(cfg: Config, world: int, words: Sequence[str]) -> tuple[str, int]:
    """The page, and the exit code: 0 if something fits, 2 if nothing does.

    Args:
        cfg: valid on `world` ranks.
        world: ranks.
        words: overrides that gave `cfg`.

    Raises:
        ConfigError: a forced kernel cannot run on this machine model.
    """
    machine = MACHINES[cfg.run.machine]
    found = best(cfg, world, machine, _SHOWN)
    if cfg.run.dry_run == WITH_PRECISION:
        other: Changes = {"precision.recipe": "bf16" if is_fp8(cfg) else "fp8_block"}
        if is_fp8(cfg):
            other["precision.dispatch"] = "auto"
        more = best(changed(cfg, other), world, machine, _SHOWN)
        found += [each.beside(other) for each in more]
        found = sorted(found, key=lambda each: each.seconds)[:_SHOWN]
    text = "\n".join(_lines(cfg, world, machine, words, found))
    return redacted(programs.here(text)) + "\n", 0 if found else 2


def _lines(
    cfg: Config, world: int, machine: Machine, words: Sequence[str], found: list[Found]
) -> Iterator[str]:
    yield "Phalanx, search over layouts"
    yield f"  model     {model_size(cfg.model)}"
    yield f"  ranks     {world} x {machine.name}, {described(cfg)}"
    given = estimated(cfg, {}, world, machine)
    yield f"  as given  {_speed(cfg, given, machine) if given else 'does not fit'}"
    if not found:
        yield "nothing fits: set parallel.world_size to more ranks, or optim.moments=bf16"
        return
    for i, one in enumerate(found, 1):
        yield f"\n{i}. {_speed(changed(cfg, one.changes), one, machine)}"
        yield _command(one.changes, world, machine, words)
    yield ""
    yield (
        "balanced experts, no waits for hosts or other delays; run.dry_run=true with one of them "
        "shows all of it"
    )


def _speed(cfg: Config, one: Found, machine: Machine) -> str:
    flops = flops_per_token(cfg.model, cfg.data.sequence_length)
    memory = storage(one.size + int(machine.reserved_gib * 2**30))
    host = f", {storage(one.host)} of host memory" if one.host else ""
    return (
        f"{one.tokens:,.0f} tokens/s/GPU, {one.tokens * flops / 1e12:.0f} TFLOP/s/GPU in "
        f"{cfg.precision.recipe}: {memory} of {machine.memory_gib} GiB{host}"
    )


def _command(changes: Changes, world: int, machine: Machine, words: Sequence[str]) -> str:
    """Launch of all ranks; later words win, so those of changed knobs are left out."""
    kept = [w for w in words if w.partition("=")[0].lstrip("+") not in {"run.dry_run", *changes}]
    if "precision.recipe" in changes:
        kept = [w for w in kept if w.partition("=")[0] != "precision"]
    nodes = -(-world // machine.node_gpus)
    ranks = f"--nproc-per-node {min(world, machine.node_gpus)}"
    launch = f"--standalone {ranks}" if nodes == 1 else f"--nnodes {nodes} {ranks}"
    return " ".join(
        [f"torchrun {launch} train.py", *map(shlex.quote, kept), overrides(changes)]
    ).strip()
