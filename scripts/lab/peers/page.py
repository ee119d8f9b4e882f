"""Tables and sentences of docs/published/simulated.md, which its tests compare with the page."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import yaml

from phalanx.configs.knobs import pluralize
from phalanx.scripts.lab.peers.simulated import Simulated
from phalanx.scripts.lab.peers.stack import is_held, stack_of

NOT_COMPARED = Path(__file__).with_name("not_compared.yaml")
FAR = 0.25  # error of a benchmark that is called a miss


def summary(runs: Sequence[Simulated]) -> str:
    """The errors of the records that are held, and of the others."""
    held = [run for run in runs if is_held(run.record)]
    other = [run for run in runs if not is_held(run.record)]
    trials = [run for run in held if not stack_of(run.record).tuned]
    benchmarks = [run for run in held if stack_of(run.record).tuned]
    missed = [run for run in benchmarks if abs(run.error) > FAR]
    every, named = pluralize(len(held), "held record"), pluralize(len(benchmarks), "benchmark")
    are = "is" if len(missed) == 1 else "are"
    trial = " and ".join(f"{run.error:+.0%}" for run in trials)
    return (
        f"The median error of the {every} is {_percent(_median(held))}; {_within(held)} are within "
        f"15 %. Of the {named} among them {len(missed)} {are} off by more than {100 * FAR:.0f} %"
        f"{': ' + _named(missed) if missed else ''}. Trials are off by {trial}. That "
        f"of the {pluralize(len(other), 'record')} that the rates were fitted to is "
        f"{_percent(_median(other))}."
    )


def table(runs: Sequence[Simulated]) -> str:
    """One row a run: what was published and what is expected, and what was assumed."""
    head = ("model", "system", "GPUs", "precision", "half", "published", "estimate", "error")
    rows = [(*head, "assumed"), ("---",) * 5 + ("---:",) * 3 + ("---",)]
    for run in runs:
        r, stack = run.record, stack_of(run.record)
        half = ("held" if is_held(r) else "fitted") + ("" if stack.tuned else ", trial")
        rate = f"[{r.tokens_per_second_per_gpu:,.0f}]({r.source})"
        precision = r.dtype if not stack.casts else "FP8, a scale a tensor"
        cells = (precision, half, rate, f"{run.tokens:,.0f}", f"{run.error:+.1%}")
        rows.append((r.model, r.system, r.hardware, *cells, "; ".join(stack.assumed)))
    return _markdown(rows)


def steps(runs: Sequence[Simulated]) -> str:
    """The parts of each step, in percent."""
    rows = [("model", "system", "tokens/s/GPU", "step"), ("---", "---", "---:", "---")]
    for run in runs:
        r, total = run.record, run.step.total
        parts = [f"{name} {part / total:.0%}" for name, part in vars(run.step).items()]
        shown = ", ".join(part for part in parts if not part.endswith(" 0%"))
        rows.append((r.model, r.system, f"{r.tokens_per_second_per_gpu:,.0f}", shown))
    return _markdown(rows)


def not_compared() -> str:
    """Published runs that cannot be estimated, each with the reason."""
    rows = [("run", "tokens/s/GPU", "why it is not compared"), ("---", "---:", "---")]
    for one in yaml.safe_load(NOT_COMPARED.read_text(encoding="utf-8")):
        rows.append((f"[{one['run']}]({one['source']})", one["rate"], one["why"]))
    return _markdown(rows)


def _median(runs: Iterable[Simulated]) -> float:
    return median(abs(run.error) for run in runs)


def _within(runs: Iterable[Simulated]) -> int:
    return sum(abs(run.error) < 0.15 for run in runs)


def _named(runs: Iterable[Simulated]) -> str:
    names = (f"{r.record.model} by {r.record.system} ({r.error:+.0%})" for r in runs)
    return ", ".join(names)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
