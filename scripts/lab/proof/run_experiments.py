#!/usr/bin/env python
"""Run the experiments of docs/proof in the order of their list, one on each GPU at a time.

    python scripts/lab/proof/run_experiments.py data/corpus results --seconds 1200 [--gpus 2]
        [--ahead S] [--copy FOLDER] [--plan] [--tiny]

Complete runs in the folder of results are skipped, so that the same command continues. A run starts
only if its expected time fits into the rest of --seconds; expected times are those of dry runs,
and follow what the runs before took. A run with run.save_interval=0 also starts if it does not fit:
it saves a checkpoint before the time is up, and the next call goes on from there. A run waits for
all runs of its sweep. A GPU for each run gives more runs than all GPUs for each: nothing is
exchanged, and a GPU is idle only while its own run starts. --ahead lets the next run start while
the steps of the last S seconds of the one before are computed; then medians of steps tell their
times (`plot_bits.py --median`). --list names another list than
experiments.yaml. --plan prints the expected times and what fits, and runs nothing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.scripts.lab.proof.experiments import (
    START,
    Experiment,
    Plan,
    expected_seconds,
    read_plan,
)

_STOPPING = 10.0  # seconds that a run has to end after it is told to
_SAVING = 60.0
"""Seconds before the time is up at which a run that goes on later is told to save and end."""
_WORTH = 120.0  # seconds that have to be left for a run that goes on later
_KEPT = ("metrics.jsonl", "console.log", "config.yaml", "output.txt")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done or out of time, 1 a run failed, 2 bad input."""
    begin = time.monotonic()
    args = parser().parse_args(argv)
    try:
        if args.gpus < 1:
            raise ValueError(f"--gpus {args.gpus}: must be at least 1")
        if not (args.plan or args.corpus.is_dir()):
            raise ValueError(
                f"there is no folder {args.corpus}: scripts/lab/corpus/make_corpus.py "
                "makes a corpus"
            )
        plan = read_plan(args.list, args.corpus, args.tiny)
        expected = expected_seconds(plan, args.machine, args.results)
    except ValueError as error:
        print(f"run_experiments: {error}", file=sys.stderr)
        return 2
    ahead = min(args.ahead, START)
    shown = {name: seconds - ahead for name, seconds in expected.items()}
    print(timetable(plan, shown, args.gpus, args.seconds, args.results), flush=True)
    if args.plan:
        return 0
    return Queue(plan, expected, args, begin + args.seconds).run()


def parser() -> argparse.ArgumentParser:
    p = programs.parser("run_experiments", __doc__)
    add = p.add_argument
    add("corpus", type=Path, metavar="CORPUS", help="folder with train.bin and held_out")
    add("results", type=Path, metavar="RESULTS", help="folder of the runs")
    add("--seconds", type=float, required=True, metavar="S", help="time for all runs")
    add("--gpus", type=int, default=2, metavar="N", help="runs at a time (default: 2)")
    add("--ahead", type=float, default=0.0, metavar="S", help="seconds (default: 0)")
    add("--list", type=Path, default=Path(__file__).with_name("experiments.yaml"), metavar="FILE")
    add("--machine", default="h100", metavar="GPU", help="of expected times (default: h100)")
    add("--copy", type=Path, metavar="FOLDER", help="gets results.tar.gz after each run")
    add("--plan", action="store_true", help="print what fits, and run nothing")
    add("--tiny", action="store_true", help="tiny models and a few steps, for a trial on a CPU")
    return p


def timetable(
    plan: Plan, expected: Mapping[str, float], gpus: int, limit: float, results: Path
) -> str:
    """Expected times of the runs that are left, on `gpus` GPUs, and those that fit into `limit`."""
    free = [0.0] * gpus
    width = max(len(each.name) for each in plan.experiments)
    rows = [f"{'run':<{width}} {'steps':>5} {'seconds':>8} {'ends at':>8}"]
    for each in plan.experiments:
        left = each.steps_left(results)
        if left == 0:
            rows.append(f"{each.name:<{width}} {each.steps:>5} {'done':>8}")
            continue
        gpu = free.index(min(free))
        begin, free[gpu] = free[gpu], free[gpu] + expected[each.name]
        row = f"{each.name:<{width}} {left:>5} {expected[each.name]:>8.0f} {free[gpu]:>8.0f}"
        if free[gpu] > limit:
            goes_on = _is_worth(each, limit - begin)
            row += "  goes on in another call" if goes_on else "  does not fit"
        rows.append(row)
    on = pluralize(gpus, "GPU")
    return "\n".join([*rows, f"all: {max(free):.0f} s on {on}; the limit is {limit:.0f} s"])


class Queue:
    """Runs that are left, and threads that take them, one for each GPU.

    `expected` seconds are by name; runs are ended at the time `end` of the monotonic clock.
    """

    def __init__(
        self, plan: Plan, expected: Mapping[str, float], args: argparse.Namespace, end: float
    ) -> None:
        self._plan, self._expected, self._args, self._end = plan, expected, args, end
        self._left = [e for e in plan.experiments if not e.is_done(args.results)]
        self._running: list[Experiment] = []
        self._took, self._promised = 0.0, 0.0
        self._failed: list[str] = []
        self._lock = threading.Condition()

    def run(self) -> int:
        """Run what fits. Returns 1 if a run failed."""
        self._args.results.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self._args.gpus) as pool:
            list(pool.map(self._work, range(self._args.gpus)))
        names = ", ".join(each.name for each in self._left)
        print(f"not begun for want of time: {names}" if names else "no run is left", flush=True)
        if self._failed:
            print(f"failed: {', '.join(self._failed)}", flush=True)
        return bool(self._failed)

    def _work(self, gpu: int) -> None:
        done: list[Future[None]] = []
        with ThreadPoolExecutor(2) as pool:
            while (experiment := self._take()) is not None:
                wait(done[:-1])  # at most two are on a GPU
                done.append(pool.submit(self._do, experiment, gpu))
                while not self._is_ending(experiment) and not done[-1].done():
                    wait(done[-1:], timeout=0.5)
        for each in done:
            each.result()

    def _is_ending(self, experiment: Experiment) -> bool:
        return experiment.seconds_left(self._args.results) <= self._args.ahead > 0

    def _take(self) -> Experiment | None:
        """The first run that fits and whose sweep is over; None if there is none."""
        with self._lock:
            while True:
                rest = self._end - time.monotonic()
                scale = self._took / self._promised if self._took else 1.0
                sweeping = {e.model for e in [*self._left, *self._running] if e.rate}
                for each in self._left:
                    fits = self._expected[each.name] * scale <= rest or _is_worth(each, rest)
                    if fits and (each.rate or each.model not in sweeping):
                        self._left.remove(each)
                        self._running.append(each)
                        return each
                if not self._running:
                    return None
                self._lock.wait(1.0)

    def _do(self, experiment: Experiment, gpu: int) -> None:
        args, name = self._args, experiment.name
        folder, begin = args.results / name, time.monotonic()
        if not experiment.resumes:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        rate = self._plan.rate(experiment, args.results)
        more = [f"run.dir={args.results}", f"run.name={name}"]
        at_end = ", an end of its sweep" if self._plan.is_at_end(experiment, rate) else ""
        print(f"{name}: begins on GPU {gpu} at optim.lr={rate}{at_end}", flush=True)
        told = self._end - (_SAVING if experiment.resumes else 0.0)
        grace = _SAVING if experiment.resumes else _STOPPING
        with (folder / "output.txt").open("a") as output:
            process = subprocess.Popen(
                experiment.command(rate, *more),
                env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            code = _wait(process, told, grace)
        took, done = time.monotonic() - begin, experiment.is_done(args.results)
        with self._lock:
            self._running.remove(experiment)
            state = "done"
            if done:
                self._took += took
                self._promised += self._expected[name]
            elif time.monotonic() >= told:
                state = "ended by the limit, not complete,"
            else:
                self._failed.append(name)
                state = f"failed with exit code {code}"
            print(f"{name}: {state} after {took:.0f} s", flush=True)
            if args.copy is not None:
                _copy(args.results, args.copy)
            self._lock.notify_all()


def _is_worth(experiment: Experiment, rest: float) -> bool:
    return experiment.resumes and rest >= _WORTH


def _wait(process: subprocess.Popen[bytes], end: float, grace: float) -> int:
    """Exit code of a run, told to end at `end` (monotonic) and killed `grace` seconds later."""
    for stop in (process.terminate, process.kill):
        try:
            return process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop()
            end = time.monotonic() + grace
    return process.wait()


def _copy(results: Path, folder: Path) -> None:
    """Write the small files of all runs to results.tar.gz, which is whole at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "results.tar.gz.tmp"
    with tarfile.open(partial, "w:gz") as archive:
        for path in sorted(results.glob("*/*")):
            if path.name in _KEPT:
                archive.add(path, arcname=f"results/{path.relative_to(results)}")
    partial.replace(folder / "results.tar.gz")


if __name__ == "__main__":
    sys.exit(main())
