"""All runs of a comparison, one after the other; finished runs are on disk and not repeated.

plan.json identifies the comparison of a folder, `runs/` has for every run its output (.log), its
result (.json, once it has ended) and its run folder.
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

from phalanx.configs.arithmetic.accounting import parameters
from phalanx.configs.formats import described
from phalanx.configs.load import load
from phalanx.configs.redact import redacted
from phalanx.configs.validate import ConfigError, validate
from phalanx.scripts.lab.compare import machine
from phalanx.scripts.lab.compare.launch import Launch, run
from phalanx.scripts.lab.compare.points import Point
from phalanx.scripts.lab.compare.results import Run

LARGEST_ON_CPU = 1e9  # parameters


class Sweep:
    """The runs of a comparison; `timeout` in seconds, `commit` of this tree."""

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
        """(repeat, point), repeats interleaved: a drifting clock affects all points."""
        self.runs: list[Run] = []
        self.facts: list[dict[str, Any]] = []  # of points, for `pictures.title`; filled by `check`

    def folder(self, repeat: int, point: int) -> Path:
        return self.out / "runs" / f"point_{point + 1:02d}_repeat_{repeat + 1}"

    def command(self, repeat: int, point: int) -> list[str]:
        return self._launch.command(self.points[point].overrides, self.folder(repeat, point))

    def check(self) -> None:
        """Raise ConfigError, one line per mistake, for mistakes that affect all points.

        One that cannot run while others can becomes a row with the reason.
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
        """Create the folder for this comparison, with its plan, or ValueError for another's."""
        plan = {
            "points": [list(point.overrides) for point in self.points],
            **asdict(self._launch),
            "hardware": facts["hardware"],
        }
        plan = json.loads(json.dumps(redacted(plan)))
        path = self.out / "plan.json"
        if path.exists():
            existing = json.loads(path.read_text(encoding="utf-8"))
            if changed := [key for key in plan if existing.get(key) != plan[key]]:
                raise ValueError(
                    f"{self.out} holds another comparison ({', '.join(changed)} changed): choose "
                    "another folder with --out, or give the command that started it"
                )
        else:
            write(path, plan)

    def go(self, on_finished: Callable[[Run], None]) -> None:
        """Do the runs that have no result yet; failed points have no repeats.

        Points that cannot run here are reported before the others run.
        """
        self.runs = [run for pending in self.turns if (run := self._known(*pending)) is not None]
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        bar = tqdm(total=len(self.turns), initial=len(self.runs), unit="run", disable=None)
        with lock(self.out / "lock") as descriptor, bar:
            for point in range(len(self.points)):
                if not any(r.point == point for r in self.runs) and (misfit := self._misfit(point)):
                    reason = "; ".join(misfit.splitlines())
                    self._keep(Run(point, 0, {}, redacted(reason), self._commit), bar, on_finished)
            for repeat, point in self.turns:
                if any((r.repeat, r.point) == (repeat, point) for r in self.runs):
                    continue
                if not any(r.point == point and r.reason for r in self.runs):
                    self._keep(self._run(repeat, point, descriptor, bar), bar, on_finished)
                bar.update()

    def _keep(self, finished: Run, bar: Any, on_finished: Callable[[Run], None]) -> None:
        write(self.folder(finished.repeat, finished.point).with_suffix(".json"), asdict(finished))
        self.runs.append(finished)
        with bar.external_write_mode():
            on_finished(finished)

    def _overrides(self, repeat: int, point: int) -> list[str]:
        folder = self.folder(repeat, point)
        return self._launch.overrides(self.points[point].overrides, folder)

    def _misfit(self, point: int) -> str:
        """Why a point cannot run on these ranks, or on this machine if ranks run here; in lines."""
        cfg, ranks = load(self._overrides(0, point)), self._launch.ranks
        try:
            validate(cfg, ranks)
        except ConfigError as error:
            return str(error)
        return "" if self._launch.launcher else machine.unsupported(cfg, ranks, self._launch.device)

    def _known(self, repeat: int, point: int) -> Run | None:
        path = self.folder(repeat, point).with_suffix(".json")
        return Run(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def _run(self, repeat: int, point: int, lock: int, bar: Any) -> Run:
        steps, started = self._launch.steps, time.monotonic()
        folder = self.folder(repeat, point)
        shutil.rmtree(folder, ignore_errors=True)  # from an interrupted run

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
        seconds = round(time.monotonic() - started, 1)
        return Run(point, repeat, figures, redacted(reason), self._commit, seconds)


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


@contextmanager
def lock(path: Path) -> Iterator[int]:
    """Lock `path`, or ValueError; yields a descriptor that child processes inherit to share it.

    So neither a second sweep nor a leftover run of a killed sweep shares GPUs with this one.
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
