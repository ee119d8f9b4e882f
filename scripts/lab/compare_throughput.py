#!/usr/bin/env python
"""Compare configurations by tokens per second: every point of a sweep is a training run of its own.

    python scripts/lab/compare_throughput.py --nproc 8 --repeat 3 \\
        experiment=gpt_oss_20b_8gpu kernels=megatron,torch,fused run.graph=off,full_iteration
    python scripts/lab/compare_throughput.py --device cpu kernels=reference,torch
    python scripts/lab/compare_throughput.py --losses --steps 2000 \\
        kernels=torch precision=bf16,fp8_block,mxfp8,nvfp4
    python scripts/lab/compare_throughput.py --nproc 8 --nnodes 8 --rdzv node0:29500 \\
        --launcher 'srun --nodes 8 --ntasks-per-node 1 {command}' \\
        experiment=gpt_oss_120b_64gpu kernels=torch,fused --out /shared/compare
    python scripts/lab/compare_throughput.py --from-json runs/compare/throughput.json

Overrides are those of train.py; a value may be a sweep of Hydra: a,b or choice(a,b), range(1,5),
glob(*) for options of a group. The others are compared with the first point. Repeats are
interleaved: all points once, then all again. On GPUs a step before the counted ones is traced, for
the share of it in which only exchanges ran (run.profile overrides that). A point
that runs out of memory or fails otherwise is a row with its reason and is not repeated; one
that cannot run here at all is reported before the others run.
Results are kept: the same command continues where it was stopped, also with a higher --repeat;
to repeat a run, delete its .json in DIR/runs.
"""

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

import torch

from phalanx.configs import programs
from phalanx.configs.validate import ConfigError
from phalanx.moe.text import devices
from phalanx.scripts.lab.compare import losses
from phalanx.scripts.lab.compare.launch import Launch
from phalanx.scripts.lab.compare.points import expand
from phalanx.scripts.lab.compare.report import Report, read, unit_of
from phalanx.scripts.lab.compare.results import Run
from phalanx.scripts.lab.compare.sweep import Sweep
from phalanx.scripts.lab.record_anchor import commit, versions
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.pictures import common_title
from phalanx.scripts.output.reader import may_leave

TOLERANCE = 0.01
"""Our records of one model with two backends differ by 0.2 and 0.8 % after 50 steps."""


def parser() -> argparse.ArgumentParser:
    p = programs.parser("compare_throughput", __doc__)
    add = p.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help=programs.here("of train.py, with sweeps"))
    add("--nproc", type=_count, metavar="N", help="ranks of a node (default: its GPUs; 2 on a CPU)")
    add("--repeat", type=_count, default=1, metavar="N", help="runs of a point (default: 1)")
    add("--steps", type=_count, default=50, metavar="N", help="the last ten count (default: 50)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--out", type=Path, metavar="DIR", help="results (default: runs/compare)")
    add("--tolerance", type=float, metavar="X", help="of losses, relative (default: 0.01)")
    add("--losses", action="store_true", help="compare loss curves too, and draw losses.png")
    add("--timeout", type=float, default=3600, metavar="S", help="of a run (default: 3600)")
    add("--nnodes", type=_count, default=1, metavar="N", help="needs --launcher and --rdzv")
    add("--rdzv", metavar="HOST:PORT", help="rendezvous endpoint of the nodes")
    add("--launcher", default="", metavar="TEXT", help="a command around {command}")
    add("--dry", action="store_true", help="print the commands and run nothing")
    add("--from-json", type=Path, metavar="PATH", help="table and chart of earlier results")
    return p


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed and checked options; SystemExit 2 with a line for a mistake."""
    p = parser()
    args = p.parse_intermixed_args(argv)
    if args.steps < 2:
        p.error("--steps: must be at least 2")
    if args.nnodes > 1 and not (args.launcher and args.rdzv):
        p.error("--nnodes: several nodes need --launcher 'srun ... {command}' and --rdzv host:port")
    if args.launcher:
        try:
            words = shlex.split(args.launcher)
        except ValueError as error:
            p.error(f"--launcher: {error}")
        if "{command}" not in args.launcher:
            p.error("--launcher: must contain {command}")
        if words[0] != "{command}" and shutil.which(words[0]) is None:
            p.error(f"--launcher: there is no {words[0]} here")
    if args.from_json and args.overrides:
        p.error("--from-json: runs nothing, leave the overrides out")
    return args


@may_leave
@reports_bad_input("compare_throughput")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 0 if all points were measured, 1 if not, 2 bad input, 130 stopped."""
    args = arguments(argv)
    if args.from_json:
        return show(args)
    return compare(args, sys.argv[1:] if argv is None else list(argv))


def compare(args: argparse.Namespace, argv: list[str]) -> int:
    """Do the remaining runs of the sweep and show the results."""
    cpu = args.device == "cpu" or not (args.launcher or torch.cuda.is_available())
    launch = Launch(
        nproc=args.nproc or per_node(args, cpu),
        steps=args.steps,
        device="cpu" if cpu and not args.dry else args.device,
        nnodes=args.nnodes,
        endpoint=args.rdzv or "localhost:0",
        launcher=args.launcher,
        traced=not cpu or (args.dry and args.device != "cpu"),
    )
    out = args.out or Path("runs/compare")
    points = expand(args.overrides)
    sweep = Sweep(out, points, args.repeat, launch, timeout=args.timeout, commit=_commit())
    sweep.check()
    if args.dry:
        for turn in sweep.turns:
            print(shlex.join(sweep.command(*turn)))
        return 0
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    facts = {
        "what": common_title(sweep.facts),
        "hardware": hardware(launch.ranks, cpu),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions([]),
        "command": " ".join(
            [programs.here("python scripts/lab/compare_throughput.py"), shlex.join(argv)]
        ),
        "steps": args.steps,
        "tolerance": tolerance,
    }
    sweep.claim(facts)
    report = Report(out, facts, [point.label for point in points])

    def show_run(run: Run) -> None:
        print(line(run, points[run.point].label), flush=True)
        report.write(sweep.runs)

    try:
        with _stoppable():
            sweep.go(show_run)
    except KeyboardInterrupt:
        left = len(sweep.turns) - len(sweep.runs)
        print(f"stopped with {left} runs to go; the same command continues", file=sys.stderr)
        return 130
    print(f"\n{report.write(sweep.runs)}\n\n{report.chart(sweep.runs)}")
    if args.losses:
        folders = [sweep.folder(0, number) for number in range(len(points))]
        labels = [point.label for point in points]
        print(f"\n{losses.show(folders, labels, sweep.runs, facts['what'])}")
    return 1 if any(run.reason for run in sweep.runs) else 0


def show(args: argparse.Namespace) -> int:
    """Write table and chart of earlier results, next to them or in --out."""
    facts, labels, runs = read(args.from_json)
    if args.tolerance is not None:
        facts["tolerance"] = args.tolerance
    report = Report(args.out or args.from_json.parent, facts, labels)
    print(f"{report.write(runs)}\n\n{report.chart(runs)}")
    return 0


def per_node(args: argparse.Namespace, cpu: bool) -> int:
    """Ranks per node without --nproc."""
    default_ranks = 2 if cpu else torch.cuda.device_count()
    if cpu and args.device == "cuda":
        raise ConfigError("--device cuda: there is no GPU here")
    if not default_ranks:
        raise ConfigError("--nproc: say how many ranks a node has, as there is no GPU here")
    return default_ranks


def line(run: Run, label: str) -> str:
    """One line with a run's result."""
    result = f"FAILED: {run.reason}"
    if not run.reason:
        rate, loss = run.figures["tokens_per_second_per_gpu"], run.figures["loss"]
        result = f"{rate:,.0f} tokens/s/{unit_of(run.figures)}, loss {loss:.4f}"
    return f"{label}, repeat {run.repeat + 1}: {result}"


def hardware(ranks: int, cpu: bool) -> str:
    """`8 x NVIDIA H200, driver ...`, from nvidia-smi, as a CUDA context here costs memory."""
    if cpu:
        return devices(ranks, "CPU process")
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        show_run = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        name, driver = show_run.stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return f"{ranks} x unknown GPU (nvidia-smi does not answer)"
    return f"{ranks} x {name}, driver {driver}"


def _commit() -> str:
    try:
        return commit()
    except ValueError:  # no git checkout
        return "unknown"


@contextmanager
def _stoppable() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C: the run in progress is ended first."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(s, signal.default_int_handler) for s in signals]
    try:
        yield
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
