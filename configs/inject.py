"""Faults that a run brings upon itself, for rehearsals: the texts of `run.inject`.

`kind@step` on every rank, `kind@step:rankN` on one. Each happens once in the life of a run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.configs.knobs import listed, repair, visible
from phalanx.configs.schema import Config

GRADIENT = {"nan": float("nan"), "spike": 1e4}  # factors of gradients of a rank
PROCESS = ("hang", "stop", "kill", "exit", "raise", "term")  # in the order of the documentation
KINDS = (*GRADIENT, *PROCESS)
_SHAPE = re.compile(r"([a-z]+)@([1-9][0-9]{0,8})(?::rank([0-9]{1,7}))?", re.ASCII)
_KNOB = "run.inject"


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: str  # an entry of `KINDS`
    step: int  # it happens when this step begins, or to the gradients of it
    rank: int | None = None  # the rank that it happens on; None is every rank

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}" + ("" if self.rank is None else f":rank{self.rank}")


def parse(text: str) -> Fault:
    """The fault of a text, as in `kill@12:rank0`, or ValueError with a reason to follow it."""
    shape = _SHAPE.fullmatch(text)
    if shape is None:
        raise ValueError("is not <kind>@<step> or <kind>@<step>:rank<number>, as in kill@12:rank0")
    kind, step, rank = shape.groups()
    if kind not in KINDS:
        raise ValueError(f"is of no known kind, which are {listed(list(KINDS))}")
    return Fault(kind, int(step), None if rank is None else int(rank))


def inject_problems(cfg: Config, ranks: int) -> Iterator[str]:
    """Yield the problems of `run.inject` on so many ranks."""
    run = cfg.run
    seen = set[Fault]()
    for text in list(run.inject):
        try:
            fault = parse(text)
            reason = _misfit(fault, cfg.run.steps, ranks) or ("is twice" if fault in seen else "")
            seen.add(fault)
        except ValueError as error:
            reason = str(error)
        if reason:
            left = [other for other in run.inject if other != text]
            left += [text] if reason == "is twice" else []
            yield repair(cfg, _KNOB, f"has {visible(text)!r}, which {reason}", left)
    if run.inject and not run.allow_inject:
        reason = "would spoil a real run, and run.allow_inject=false (of run=pretrain) refuses it"
        yield repair(cfg, _KNOB, reason, [])


def _misfit(fault: Fault, steps: int, ranks: int) -> str:
    if fault.step > steps:
        return f"comes after the last step (run.steps={steps})"
    if fault.rank is not None and fault.rank >= ranks:
        return f"names no rank of this run, whose last is rank {ranks - 1}"
    if fault.kind in ("hang", "stop") and ranks == 1:
        return "would last for ever, as no other rank watches a single one"
    return ""
