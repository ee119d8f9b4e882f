"""The list of experiments: names, overrides, learning rates found by a sweep, expected seconds."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from phalanx.moe.report.loggers import is_finite, lines, read

START = 35.0  # assumed seconds of a run beside its steps: imports, capture, validations
REACHED = 0.8  # assumed share of the speed of the dry run that a run reaches

_TRAIN = Path(__file__).resolve().parents[3] / "train.py"
_MIXTURE = "experiment=proof_moe"
_STEP = re.compile(r"^ +step ([\d.]+) s: [\d,]+ tokens/s", re.MULTILINE)


@dataclass(frozen=True)
class Experiment:
    """A run of train.py on one GPU."""

    name: str
    model: str  # model of the sweep, whose learning rate it takes
    steps: int
    overrides: tuple[str, ...]  # without those that follow from the other fields
    rate: str = ""  # learning rate in a sweep; empty: the sweep's result

    def command(self, rate: str, *more: str) -> list[str]:
        """Command line of the run at a learning rate; `more` are further overrides."""
        schedule = [
            f"run.steps={self.steps}",
            f"optim.lr={rate}",
            f"optim.min_lr={float(rate) / 10:g}",
            f"optim.warmup_steps={self.steps // 10}",
        ]
        return [sys.executable, str(_TRAIN), *self.overrides, *schedule, *more]

    @property
    def resumes(self) -> bool:
        """Whether the run saves a checkpoint when it is ended, and goes on from it."""
        return "run.save_interval=0" in self.overrides

    def steps_left(self, results: Path) -> int:
        """Steps that the run in a folder of results still has to do."""
        ends = [r for r in lines(results / self.name / "metrics.jsonl") if _is_end(r)]
        left = self.steps - (ends[-1]["at"] if ends else 0)
        return left if left == 0 or self.resumes else self.steps

    def seconds_left(self, results: Path) -> float:
        """Seconds of its steps that are left, by the last one that was logged."""
        logged = [r for r in _steps(results / self.name) if "step_time" in r]
        if not logged:
            return math.inf
        return float((self.steps - logged[-1]["step"]) * logged[-1]["step_time"])

    def is_done(self, results: Path) -> bool:
        """Return whether the run in a folder of results is complete."""
        return self.steps_left(results) == 0


def _steps(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return read(path) if path.exists() else []


def _is_end(record: dict[str, Any]) -> bool:
    return record.get("event") == "summary"


@dataclass(frozen=True)
class Plan:
    """Experiments in the order in which they run."""

    experiments: tuple[Experiment, ...]
    assumed: str  # learning rate of models whose sweep has no result

    def sweep(self, model: str) -> list[Experiment]:
        return [e for e in self.experiments if e.rate and e.model == model]

    def rate(self, experiment: Experiment, results: Path) -> str:
        """Learning rate of an experiment: its own, or the best one of the complete sweep runs.

        A run that goes on keeps its own.
        """
        if experiment.rate:
            return experiment.rate
        begun = results / experiment.name / "config.yaml"
        if experiment.resumes and begun.exists():
            config = yaml.safe_load(begun.read_text(encoding="utf-8"))
            return f"{float(config['optim']['lr']):g}"
        known = {
            e.rate: final_bits(results / e.name)
            for e in self.sweep(experiment.model)
            if e.is_done(results)
        }
        return min(known, key=lambda rate: known[rate], default=self.assumed)

    def is_at_end(self, experiment: Experiment, rate: str) -> bool:
        """Return whether a rate is the smallest or largest of an experiment's sweep."""
        rates = sorted(float(e.rate) for e in self.sweep(experiment.model))
        return not experiment.rate and float(rate) in (*rates[:1], *rates[-1:])


def final_bits(run: Path) -> float:
    """Held-out bits per byte at the end of a run; infinite if it has none, or was cut short."""
    key, records = "valid_bits_per_byte", lines(run / "metrics.jsonl")
    bits = [r[key] for r in records if is_finite(r.get(key))]
    return float(bits[-1]) if bits and any(map(_is_end, records)) else float("inf")


def _read_list(path: Path) -> dict[str, Any]:
    """Content of a list, or ValueError. An extended one gives its `tiny`, and its `common`."""
    try:
        listed: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"--list {path}: {' '.join(str(error).split())}") from None
    if (extended := listed.pop("extends", None)) is None:
        return listed
    base = _read_list(path.with_name(extended))
    return {"tiny": base["tiny"], **listed, "common": [*base["common"], *listed["common"]]}


def _flat(overrides: list[str | list[str]]) -> Iterator[str]:
    for each in overrides:
        yield from [each] if isinstance(each, str) else each


def read_plan(path: Path, corpus: Path, tiny: bool) -> Plan:
    """Plan of a file like experiments.yaml, for the corpus in a folder; `tiny` for a CPU."""
    listed = _read_list(path)
    sweep, small = listed["sweep"], listed["tiny"]
    common = [override.format(corpus=corpus.absolute()) for override in listed["common"]]

    def experiment(
        name: str, model: str, steps: int, more: list[str | list[str]], rate: str = ""
    ) -> Experiment:
        overrides = [*_flat(sweep["models"][model]["overrides"]), *common, *_flat(more)]
        if tiny:
            mixture = small.get("mixture", ()) if _MIXTURE in overrides else ()
            overrides += [*small["overrides"], *mixture]
        return Experiment(name, model, small["steps"] if tiny else steps, tuple(overrides), rate)

    def every() -> Iterator[Experiment]:
        for model, swept in sweep["models"].items():
            for rate in swept["rates"]:
                name = f"sweep_{model}_{rate}"
                yield experiment(name, model, sweep["steps"], sweep["overrides"], rate)
        for each in listed["experiments"]:
            steps = each.get("steps", listed["steps"])
            yield experiment(each["name"], each["model"], steps, each["overrides"])

    return Plan(tuple(every()), sweep["assumed"])


def step_seconds(experiment: Experiment, machine: str) -> float:
    """Expected seconds of a step on a `run.machine`, from a dry run, or ValueError."""
    command = experiment.command("1e-3", "run.dry_run=true", f"run.machine={machine}")
    done = subprocess.run(command, capture_output=True, text=True)
    found = _STEP.search(done.stdout)
    if found is None:
        last = (done.stderr.strip().splitlines() or ["no expected step"])[-1]
        raise ValueError(f"the dry run of {experiment.name} failed: {last}")
    return float(found[1])


def expected_seconds(plan: Plan, machine: str, results: Path) -> dict[str, float]:
    """Expected seconds of what is left of each run in a folder of results, by its name.

    Runs that differ in seeds alone share a dry run. Raises ValueError if one fails.
    """

    def kind(experiment: Experiment) -> tuple[str, ...]:
        return tuple(o for o in experiment.overrides if not o.startswith("run.seed="))

    kinds = {kind(each): each for each in plan.experiments}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        steps = pool.map(lambda each: step_seconds(each, machine), kinds.values())
        seconds = dict(zip(kinds, steps, strict=True))
    return {
        e.name: START + e.steps_left(results) * seconds[kind(e)] / REACHED for e in plan.experiments
    }
