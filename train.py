"""Train a mixture-of-experts model.

    torchrun --standalone --nproc-per-node N train.py [overrides]

Exit codes of a rank (docs/operations.md):

      0  finished, or stopped by a signal after a checkpoint (unless `run.requeue_code` is set)
      1  unexpected error, or out of GPU memory
      2  invalid configuration, input, data or run folder, or a dry run that does not fit
     43  diverged: the loss or a gradient is not finite
     44  no usable checkpoint
     45  another rank failed, died or hangs; a message names it
    130  interrupted by a third Ctrl-C, without a checkpoint
"""

import atexit
import contextlib
import os
import sys
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NoReturn

from phalanx.configs.tables.capabilities import PHASES
from phalanx.kernels.cache import folder
from phalanx.moe.report.console import quiet
from phalanx.parallel.fault import launcher
from phalanx.parallel.fault.activity import set_activity, start_run
from phalanx.parallel.fault.guard import Guard
from phalanx.parallel.fault.signals import AGAIN, PENDING, StopSignal

if TYPE_CHECKING:
    from phalanx.configs.schema import Config


def main(argv: list[str], *, ends_process: bool = False) -> int:
    """Compose, validate, train.

    Args:
        argv: overrides and options.
        ends_process: the process is going to end with the returned code: nothing that goes with it
            is taken apart before, which takes seconds.

    Returns:
        The exit code; AGAIN if the next phase of the run is to begin, in a new process.
    """
    quiet()
    start_run()
    # CUDA reads it when it starts. Streams share as many queues, in which a kernel waits for all
    # before it: with CUDA's 8, micro-batches that overlap ran one after the other in parts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # torch reads it at its first tensor. Large host tensors, as those of a checkpoint that is read,
    # have huge pages: pages of 4 KiB are cleared one fault at a time, at 1 to 2 GB/s.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Kernels in Triton are kept beside the others: one folder to keep, or to share between nodes.
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder() / "triton"))
    if "--check" in argv:
        from phalanx.moe.run.check import check

        return max(map(check, _configurations(argv)))
    with Guard() as guard, StopSignal() as stop:
        phases = _configurations(argv)
        cfg = phases[-1]
        from phalanx.moe.run.check import dry_run, set_vocabulary

        if problem := next(filter(None, map(set_vocabulary, phases)), None):
            # On every host that lacks the data.
            _refuse(problem, speaks=os.environ.get("LOCAL_RANK", "0") == "0")
            return 2
        if cfg.run.dry_run:
            return max(dry_run(each, argv) for each in phases)
        if cfg.run.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        code = _train(phases, argv, stop, guard, ends_process)
        if code == AGAIN and stop.received:
            os.environ[PENDING] = stop.received
        return code


def _configurations(argv: list[str]) -> "list[Config]":
    """Configuration of the command line, or those of the phases of its run.

    Mistakes end the process, and torchrun's report of it.
    """
    from phalanx.configs.load import Ended, from_argv

    try:
        cfg = from_argv(argv)
        return resolve_name(PHASES["configurations"])(cfg, argv) if cfg.run.phases else [cfg]
    except Ended as end:
        if end.code:
            launcher.tell(end.text.rstrip())
        raise


def _refuse(error: Exception, *, speaks: bool) -> None:
    """Print what ends this run, if this rank speaks for others, and pass it to the launcher."""
    from phalanx.configs.redact import redacted

    text = redacted(f"error: {error}")
    if speaks:
        print(text, file=sys.stderr)
    launcher.tell(text)


def _train(
    phases: "list[Config]", argv: list[str], stop: StopSignal, guard: Guard, ends_process: bool
) -> int:
    """Say what starts, then import what takes seconds, then train."""
    from phalanx.configs.redact import redacted
    from phalanx.moe.report.console import Console
    from phalanx.moe.run.launch import Launch, announce, command_line
    from phalanx.moe.run.preflight import finished_lines, newest_checkpoint
    from phalanx.parallel.megatron.imports import check_version

    rank, world, cfg = int(os.environ.get("RANK", "0")), launcher.launcher_world(), phases[-1]
    console = Console(rank)
    with console.copied():
        try:
            check_version()  # before imports that another release may not have
        except ValueError as error:
            _refuse(error, speaks=rank == 0)
            return 2
        if world == 1 and (
            lines := finished_lines(cfg)
        ):  # rank 0 of several asks when they have met
            for line in lines:
                print(redacted(f"-- {line}"))
            return 0
        announce(cfg, world)
        try:
            set_activity("start: imports")
            from phalanx.parallel.megatron.imports import importing_megatron

            with importing_megatron():
                from phalanx.moe.run.entry import run

            launch = Launch(command_line(argv), console, phases)
            return run(cfg, stop, guard, launch, ends_process=ends_process)
        except KeyboardInterrupt:
            print(
                redacted(f"interrupted: nothing more was saved; {newest_checkpoint(cfg)}"),
                file=sys.stderr,
            )
            return 130


def _leave(code: int) -> NoReturn:
    """End this process, whatever state its collectives and threads are in.

    The interpreter's own end takes seconds to take torch and its CUDA context apart, and after a
    failure it would wait for ranks that wait for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if not code:
        atexit._run_exitfuncs()  # processes of trackers and compilers
        with contextlib.suppress(ValueError):  # absl closes the streams that it logs to
            sys.stdout.flush()
            sys.stderr.flush()
    os._exit(code)


def command() -> NoReturn:
    """`train.py`, or `phalanx-train` where the wheel is installed."""
    try:
        if (code := main(sys.argv[1:], ends_process=True)) == AGAIN:
            resolve_name(PHASES["again"])()
        _leave(code)
    except ModuleNotFoundError as missing:
        from phalanx.configs import programs

        programs.leave_without(missing)


if __name__ == "__main__":
    command()
