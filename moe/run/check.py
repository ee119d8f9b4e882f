"""Findings of a launch before it imports torch: mistakes, and pages of a dry run."""

import os
import sys
from pkgutil import resolve_name

from phalanx.configs.knobs import get
from phalanx.configs.schema import Config
from phalanx.configs.tables.capabilities import PLANNER
from phalanx.parallel.fault.launcher import launcher_world


def check(cfg: Config) -> int:
    """Say on stderr what would stop this run, as far as one process knows; the exit code."""
    from phalanx.configs.redact import redacted
    from phalanx.moe.data.blend import shown
    from phalanx.moe.run.preflight import exit_code, preflight

    problem = set_vocabulary(cfg)
    if cfg.run.dry_run and not problem:
        return 0
    if problem:
        cfg.model.vocab_size = 256  # to find what else is wrong
    found = preflight(cfg)
    if problem:
        found.errors = [problem, *(e for e in found.errors if str(e) != str(problem))]
    elif not found.errors and (line := shown(cfg)):
        found.notes.append(f"vocabulary: {line}")
    found.errors += _on_this_machine(cfg)
    if os.environ.get("RANK", "0") == "0":
        phase = f"phase {cfg.run.phases[-1].name}: " if cfg.run.phases else ""
        for line in (*found.notes, *(f"error: {error}" for error in found.errors)):
            print(redacted(phase + line), file=sys.stderr)
    return exit_code(found.errors[0]) if found.errors else 0


def set_vocabulary(cfg: Config) -> Exception | None:
    """Set a `model.vocab_size` that is left open from the data; return the error if that fails."""
    from phalanx.moe.data.blend import fill
    from phalanx.moe.data.host_cache import DataError

    try:
        fill(cfg)
    except DataError as error:
        return error
    return None


def _on_this_machine(cfg: Config) -> list[Exception]:
    """Errors of a run that is to start on this machine, as the machine refuses it.

    Choices that `auto` would not make, and sizes that are not small: only these import torch, which
    takes seconds.
    """
    from phalanx.configs.validate import ConfigError
    from phalanx.parallel.megatron.imports import check_version

    world = launcher_world()
    if cfg.parallel.world_size not in (0, world):
        return []  # it is to run elsewhere
    m, d = cfg.model, cfg.data
    matrices = 3 * m.layers * (m.moe.experts * m.moe.ffn or m.dense_ffn) + m.vocab_size
    logits = d.micro_batch * d.sequence_length * m.vocab_size
    large, asks = matrices * m.hidden + logits >= _LARGE, asks_machine(cfg)
    try:
        check_version()
        if not large and not asks:
            return []
        if cfg.run.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from phalanx.parallel.megatron.imports import importing_megatron

        with importing_megatron():
            from phalanx.moe.plan.facts import expected
            from phalanx.moe.plan.memory_check import launch_refusal
            from phalanx.moe.plan.resolve import resolve

        if asks:
            resolve(cfg, expected(cfg, world))
        refusal = launch_refusal(cfg, world) if large else None
    except ValueError as error:
        return [error]
    return [ConfigError(refusal)] if refusal else []


_LARGE = 10**8  # parameters and logits, below which a run fits wherever torch does


def dry_run(cfg: Config, argv: list[str]) -> int:
    """Say what the run would take, or what layout is best; 0 if it fits, 2 if not."""
    from phalanx.configs.redact import redacted
    from phalanx.configs.validate import ConfigError
    from phalanx.moe.data.host_cache import DataError

    world = cfg.parallel.world_size or launcher_world()
    try:
        if cfg.run.dry_run is True:
            page, code = resolve_name(PLANNER["page"])(cfg, world)
        else:
            page, code = resolve_name(PLANNER["search"])(cfg, world, argv)
    except (ConfigError, DataError) as error:
        page, code = redacted(f"error: {error}\n"), 2
    if os.environ.get("RANK", "0") == "0":
        for phase in cfg.run.phases[-1:]:
            print(f"phase {phase.name}: steps {phase.first + 1} to {cfg.run.steps}")
        print(page, end="", file=sys.stderr if page.startswith("error") else sys.stdout)
    return code


def asks_machine(cfg: Config) -> bool:
    """True if a machine may refuse a choice of a run, which `auto` would not have made."""
    return any(get(cfg, path) not in free for path, free in _UNREFUSED.items())


_UNREFUSED: dict[str, tuple[object, ...]] = {
    "kernels.backend": ("auto",),
    "kernels.attention": ("auto",),
    "kernels.norm": ("auto",),
    "parallel.dispatch": ("auto",),
    "parallel.expert_replication": (0, "auto"),
    "parallel.overlap_microbatches": ("auto", "off"),
    "run.device": ("auto", "cpu"),
    "run.graph": ("auto", "off"),
}
"""Values that every machine can serve, of knobs with others."""
