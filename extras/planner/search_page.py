"""The page of `run.dry_run=search`: the best layouts with their memory and commands."""

import gc
import shlex
from collections.abc import Iterator, Sequence

from phalanx.configs import programs
from phalanx.configs.arithmetic.accounting import flops_per_token
from phalanx.configs.formats import described, is_fp8
from phalanx.configs.knobs import Changes, changed, get, listed, overrides, pluralize
from phalanx.configs.layout import layout_problems
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MEMORY_ERROR, Machine, machine_named
from phalanx.configs.validate import ConfigError
from phalanx.extras.planner import certainty
from phalanx.extras.planner.best import Found, best, estimated
from phalanx.extras.planner.layouts import layouts
from phalanx.moe.text import model_size, storage

WITH_PRECISION = "search_precision"  # value of `run.dry_run` that compares bf16 with FP8
_SHOWN = 5


def search_page(cfg: Config, world: int, words: Sequence[str]) -> tuple[str, int]:
    """The page, and the exit code: 0 if something fits, 2 if nothing does.

    The `words` are overrides that gave `cfg`, whose layout may be invalid. Raises ConfigError if a
    forced kernel cannot run on this machine model, or no layout of `world` ranks is valid.
    """
    gc.freeze()  # or collections of a search walk all that was imported, a third of a second
    machine = machine_named(cfg.run.machine)
    if machine.only_memory:
        raise ConfigError(
            f"run.machine={cfg.run.machine} has no rates to search by; set run.machine=h100"
        )
    problems = list(layout_problems(changed(cfg, {}), world))
    if problems and not _has_layout(cfg, world, machine):
        raise ConfigError(_other_ranks(cfg, world, machine) or "\n".join(problems))
    found = best(cfg, world, machine, _SHOWN)
    if cfg.run.dry_run == WITH_PRECISION:
        other: Changes = {"precision.recipe": "bf16" if is_fp8(cfg) else "fp8_block"}
        if is_fp8(cfg):
            other["precision.dispatch"] = "auto"
        more = best(changed(cfg, other), world, machine, _SHOWN)
        found += [each.beside(other) for each in more]
        found = sorted(found, key=lambda each: each.seconds)[:_SHOWN]
    helps = [] if found else _remedies(cfg, world, machine)
    text = "\n".join(_lines(cfg, world, machine, words, found, helps, problems))
    return redacted(programs.here(text)) + "\n", 0 if found else 2


def _has_layout(cfg: Config, world: int, machine: Machine) -> bool:
    every = (changed(cfg, each.changes()) for each in layouts(cfg, world, machine.node_gpus))
    return any(not any(layout_problems(trial, world)) for trial in every)


_TRIED = 6  # numbers of ranks on either side, of which one that has a layout is named


def _other_ranks(cfg: Config, world: int, machine: Machine) -> str:
    """The line on a number of ranks that no layout divides, with the nearest that have one."""
    batch = cfg.data.global_batch
    odd = [each for each in range(1, batch + 1, 2) if batch % each == 0]
    sizes = sorted(each * 2**n for each in odd for n in range(world.bit_length() + 1))
    below = [each for each in sizes if each < world][::-1][:_TRIED]
    above = [each for each in sizes if each > world][:_TRIED]
    near = (next((n for n in some if _has_layout(cfg, n, machine)), 0) for some in (below, above))
    wanted = [overrides({"parallel.world_size": ranks}) for ranks in near if ranks]
    if not wanted:
        return ""
    return (
        f"no layout in powers of two divides {pluralize(world, 'rank')} and "
        f"{overrides({'data.global_batch': batch})}; set {listed(wanted)}"
    )


_MOST_RANKS = 4096  # of which a search that finds nothing says that they would be enough


def _more_ranks(cfg: Config, world: int) -> Iterator[Changes]:
    """Twice as many ranks, four times and so on, with a sequence for each."""
    ranks = 2 * world
    while ranks <= max(_MOST_RANKS, 64 * world):
        yield {"parallel.world_size": ranks, "data.global_batch": max(cfg.data.global_batch, ranks)}
        ranks *= 2


def _remedies(cfg: Config, world: int, machine: Machine) -> list[tuple[Changes, Found]]:
    """Changes of other knobs with each of which some layout fits, and the fastest of them."""
    kinds: list[list[Changes]] = [
        list(_more_ranks(cfg, world)),
        [{"optim.moments": "bf16"}, {"optim.moments": "bf16", "parallel.grad_dtype": "bf16"}],
    ]
    found = []
    for kind in kinds:
        for wanted in kind:
            changes = {path: value for path, value in wanted.items() if get(cfg, path) != value}
            if not changes:
                continue
            trial = changed(cfg, changes)
            if fits := best(trial, trial.parallel.world_size or world, machine, 1):
                found.append((changes, fits[0]))
                break
    return found


def _lines(
    cfg: Config,
    world: int,
    machine: Machine,
    words: Sequence[str],
    found: list[Found],
    helps: list[tuple[Changes, Found]],
    problems: list[str],
) -> Iterator[str]:
    yield "Phalanx, search over layouts"
    yield f"  model     {model_size(cfg.model)}"
    yield f"  ranks     {world} x {machine.name}, {described(cfg)}"
    d = cfg.data
    yield f"  batch     {pluralize(d.global_batch, 'sequence')} of {d.sequence_length} tokens"
    given = estimated(cfg, {}, world, machine)
    fits = f"does not fit with {MEMORY_ERROR:.0%} to spare, the error of estimates"
    without = f"not on {pluralize(world, 'rank')}: {problems[0]}" if problems else fits
    yield f"  as given  {_speed(cfg, given, machine) if given else without}"
    if not found:
        yield f"nothing fits{'' if helps else ', and neither more ranks nor smaller states help'}"
        for changes, one in helps:
            yield f"  with {overrides(changes)}: {_speed(changed(cfg, changes), one, machine)}"
        return
    for i, one in enumerate(found, 1):
        yield f"\n{i}. {_speed(changed(cfg, one.changes), one, machine)}"
        yield _command(one.changes, world, machine, words)
    first = changed(cfg, found[0].changes)
    yield f"\nof the first {next(certainty.lines(first, world, machine, found[0].tokens))}"
    yield (
        "balanced experts, no waits for hosts or other delays; run.dry_run=true with one of them "
        "shows all of it"
    )


def _speed(cfg: Config, one: Found, machine: Machine) -> str:
    flops = flops_per_token(cfg.model, cfg.data.sequence_length)
    memory = storage(one.size + int(machine.reserved_gib * 2**30))
    host = f", {storage(one.host)} of host memory" if one.host else ""
    host += f", network busy for {one.busy:.0%} of the step" if one.busy > certainty.BUSY else ""
    natural = f", {one.natural:,.0f} with natural routing" if one.natural < one.tokens else ""
    return (
        f"{one.tokens:,.0f} tokens/s/GPU, {one.tokens * flops / 1e12:.0f} TFLOP/s/GPU in "
        f"{cfg.precision.recipe}{natural}: {memory} of {machine.memory_gib} GiB{host}"
    )


def _command(changes: Changes, world: int, machine: Machine, words: Sequence[str]) -> str:
    """Launch of all ranks; later words win, so those of changed knobs are left out."""
    kept = [w for w in words if w.partition("=")[0].lstrip("+") not in {"run.dry_run", *changes}]
    if "precision.recipe" in changes:
        kept = [w for w in kept if w.partition("=")[0] != "precision"]
    # torchrun starts as many on each host.
    of_host = next(n for n in range(min(world, machine.node_gpus), 0, -1) if world % n == 0)
    nodes, ranks = world // of_host, f"--nproc-per-node {of_host}"
    launch = f"--standalone {ranks}" if nodes == 1 else f"--nnodes {nodes} {ranks}"
    return " ".join(
        [f"torchrun {launch} train.py", *map(shlex.quote, kept), overrides(changes)]
    ).strip()
