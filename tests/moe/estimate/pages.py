"""Pages of dry runs, or some sections of them, for tests."""

import functools

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from phalanx.moe.estimate.dry_run import dry_run, sections

RUN, EXPERTS, STEP = "Phalanx", "Experts of one layer", "Expected step"
MEMORY, GROUPS, OPT_INS = "Memory of a rank", "Process groups", "Off by default"
"""Headings of sections."""


@functools.cache
def loaded(*overrides: str) -> Config:
    return load(overrides)


@functools.cache
def page(*overrides: str, world: int) -> tuple[str, int]:
    cfg = loaded(*overrides)
    validate(cfg, world)
    return dry_run(cfg, world)


def section(heading: str | tuple[str, ...], *overrides: str, world: int) -> str:
    """Lines of one section of the page, or of several, without the time that the others take."""
    cfg = loaded(*overrides)
    validate(cfg, world)
    found, _ = sections(cfg, world)
    bodies = [lines for head, lines in found.items() if head.startswith(heading)]
    assert bodies
    return "".join(f"\n  {line}" for lines in bodies for line in lines) + "\n"


def fitting(*overrides: str, world: int) -> bool:
    """True if the page would say that the run fits, and the exit code be 0."""
    cfg = loaded(*overrides)
    validate(cfg, world)
    return sections(cfg, world)[1]
