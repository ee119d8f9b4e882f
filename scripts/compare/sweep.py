"""All runs of a comparison in turn; what is done is on disk and is not done again.

A folder holds one comparison: plan.json says which, `runs/` has for every run its output (.log),
its result (.json, once it is over) and the folder that train.py made.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from phalanx.configs.formats import described
from phalanx.configs.load import load
from phalanx.configs.redact import redacted
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.estimate.accounting import parameters
from phalanx.scripts.compare import machine
from phalanx.scripts.compare.launch import Launch, run
from phalanx.scripts.compare.points import Point
from phalanx.scripts.compare.results import Run

LARGEST_ON_CPU = 1e9  # parameters


class Sweep:
    """The runs of a comparison.

    Args:
        out: its folder.
        points: in order.
        repeats: of each.
        launch: starts them.
        timeout: seconds of a run.
        commit: of this tree.
    """

    def __init__(
        self,
        out: Path,
        points: Sequence[Point],
        repeats: int,
        launch: Launch,
        *,
        timeout: float,
        commit: str,
    ) -> None:
        self.out, self.points, self._launch = out, points, launch
        self._timeout, self._commit = timeout, commit
        self.turns = [(r, p) for r in range(repeats) for p in range(len(points))]
        """(repeat, point), the repeats interleaved: a clock that drifts meets all points."""
        self.runs: list[Run] = []
        self.facts: list[dict[str, Any]] = []
        """What each point trains, as `scripts.pictures.title` takes it; known after `refuse`."""

    def folder(self, repeat: int, point: int) -> Path:
        """Of a run."""
        return self.out / "runs" / f"point_{point + 1:02d}_repeat_{repeat + 1}"

    def command(self, repeat: int, point: int) -> list[str]:
        """Of a run."""
        return self._launch.command(self.points[point].overrides, self.folder(repeat, point))

    def refuse(self) -> None:
        """Raise ConfigError, one line per mistake, for what no point can be run with.

        What suits some of the points alone is left to the rows of the others.
        """
        mistakes: list[str] = []
        misfits: list[str] = []
        for number in range(len(self.points)):
            try:
                cfg = load(self._overrides(0, number))
            except ConfigError as error:
                mistakes += str(error).splitlines()
                continue
            self.facts.append(
                {
                    "model": cfg.model.name,
                    "precision": described(cfg),
                    "sequence": cfg.data.sequence_length,
                    "batch": cfg.data.global_batch,
                    "data": cfg.data.source,
                }
            )
            size = parameters(cfg.model).total
            if self._launch.device == "cpu" and size > LARGEST_ON_CPU:
                text = f"model={cfg.model.name}: {size / 1e9:.0f} B parameters are too many"
                mistakes.append(f"{text} for CPU processes; take model=tiny or one like it")
            misfits.append(self._misfit(number))
        if all(misfits):
            mistakes += [line for text in misfits for line in text.splitlines()]
        if mistakes:
            raise ConfigError("\n".join(dict.fromkeys(mistakes)))

    def claim(self, facts: dict[str, Any]) -> None:
        """Make the folder this comparison's; `facts` come with it.

        Raises:
            ValueError: it is another's.
        """
        plan = {
            "points": [list(point.overrides) for point in self.points],
            **asdict(self._launch),
            "hardware": facts["hardware"],
        }
        plan = json.loads(json.dumps(redacted(plan)))
        path = self.out / "plan.json"
        if path.exists():
            there = json.loads(path.read_text(encoding="utf-8"))
            if changed := [key for key in plan if there.get(key) != plan[key]]:
                raise ValueError(
                    f"{self.out} holds another comparison ({', '.join(changed)} changed): choose "
                    "another folder with --out, or give the command that began it"
                )
        else:
            write(path, plan)

    def go(self, done: Callable[[Run], None]) -> None:
        """Do what is not done yet. `done` is told of every new run; a failed point is left.

        Points that cannot run here are told of before the others take their hours.
        """
        self.runs = [run for turn in self.turns if (run := self._known(*turn)) is not None]
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        bar = tqdm(total=len(self.turns), initial=len(self.runs), unit="run", disable=None)
        with lock(self.out / "lock") as descriptor, bar:
            for point in range(len(self.points)):
                if not any(r.point == point for r in self.runs) and (why := self._misfit(point)):
                    reason = "; ".join(why.splitlines())
                    self._keep(Run(point, 0, {}, redacted(reason), self._commit), bar, done)
            for repeat, point in self.turns:
                if any((r.repeat, r.point) == (repeat, point) for r in self.runs):
                    continue
                if not any(r.point == point and r.reason for r in self.runs):
                    self._keep(self._run(repeat, point, descriptor, bar), bar, done)
                bar.update()

    def _keep(self, made: Run, bar: Any, done: Callable[[Run], None]) -> None:
        write(self.folder(made.repeat, made.point).with_suffix(".json"), asdict(made))
        self.runs.append(made)
        with bar.external_write_mode():
            done(made)

    def _overrides(self, repeat: int, point: int) -> list[str]:
        folder = self.folder(repeat, point)
        return self._launch.overrides(self.points[point].overrides, folder)

    def _misfit(self, point: int) -> str:
        """Why a point cannot run on these ranks, or on this machine if they are here; in lines."""
        cfg, ranks = load(self._overrides(0, point)), self._launch.ranks
        try:
            validate(cfg, ranks)
        except ConfigError as error:
            return str(error)
        return "" if self._launch.launcher else machine.refuse(cfg, ranks, self._launch.device)

    def _known(self, repeat: int, point: int) -> Run | None:
        path = self.folder(repeat, point).with_suffix(".json")
        return Run(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def _run(self, repeat: int, point: int, lock: int, bar: Any) -> Run:
        steps, began = self._launch.steps, time.monotonic()
        folder = self.folder(repeat, point)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short

        def seen(step: int) -> None:
            bar.set_postfix_str(f"{self.points[point].label}, step {step}/{steps}")

        seen(0)
        figures, reason = run(
            self.command(repeat, point),
            folder,
            steps=steps,
            timeout=self._timeout,
            lock=lock,
            seen=seen,
        )
        seconds = round(time.monotonic() - began, 1)
        return Run(point, repeat, figures, redacted(reason), self._commit, seconds)


def write(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


@contextmanager
def lock(path: Path) -> Iterator[int]:
    """Hold `path`; the value is a descriptor that a process inherits to hold it as well.

    So neither a second sweep nor a run that a killed sweep left behind shares GPUs with this one.

    Raises:
        ValueError: somebody holds it.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{path.parent} is in use: by another comparison, or by a run that a killed one "
                "left; wait for it or end it"
            ) from None
        yield file.fileno()
