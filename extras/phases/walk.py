"""Which phase a run is in, and the process of its next one.

A phase ends with a checkpoint, and the next one begins as a restart does: in a new process, from
the newest checkpoint. So there is one way into a phase, after a crash too, and nothing of a phase
stays in memory: graphs, process groups, buffers. The launcher sees one process: it keeps its id.
"""

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError
from phalanx.moe.run.preflight import checkpoint_root
from phalanx.parallel.checkpoint import saved_config
from phalanx.parallel.checkpoint import start as run_start
from phalanx.parallel.checkpoint.commit import Invalid
from phalanx.parallel.checkpoint.saved_config import CheckpointError
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.fault.signals import REPLACED

if TYPE_CHECKING:
    import torch.distributed as dist

_MOST = 1_000  # processes that replace each other, far above the phases of any run


def present(phases: Sequence[Config], store: "dist.Store", rank: int) -> Config:
    """Configuration of the phase that is to go on, by what rank 0 finds; the last if all are done.

    Args:
        phases: configurations of all phases, the same on every rank.
        store: of the job, where rank 0 tells the others.

    Raises:
        ConfigError: `beyond`, on every rank.
    """
    if rank == 0:
        step = reached(phases[0])
        number = next((i for i, cfg in enumerate(phases) if step < cfg.run.steps), -1)
        store.set("phase", beyond(phases, step) or str(number))
    told = store.get("phase").decode()
    if told.lstrip("-").isdigit():
        return phases[int(told)]
    raise ConfigError(told)


def beyond(phases: Sequence[Config], step: int) -> str:
    """Error line on phases that end before the step that a run has done; empty for others."""
    if step <= (end := phases[-1].run.steps):
        return ""
    return (
        f"run.phases end at step {end}, and the checkpoint to go on from is of step {step}, which "
        "counts: give them more steps, or put what the checkpoint has done before them as a phase"
    )


def reached(cfg: Config) -> int:
    """Steps of the checkpoint that a launch would go on from; 0 without one that can be read."""
    root, run = checkpoint_root(cfg), cfg.run
    try:
        record = run_start.read(root)
        newest = None if run_start.starts_over(run, record) else saved_config.newest(root)
        path = run_start.decide(run, record, newest).path
        return 0 if path is None else saved_config.configuration(path).step
    except (CheckpointError, CheckpointMismatch, ConfigError, Invalid, OSError):
        return 0  # the checks of the start say what is wrong


def again() -> NoReturn:
    """Replace this process by a new one of the same command. Raises RuntimeError if that loops."""
    replaced = int(os.environ.get(REPLACED, "0")) + 1
    if replaced > _MOST:
        raise RuntimeError(f"{replaced} processes have replaced each other, and no phase goes on")
    os.environ[REPLACED] = str(replaced)
    atexit._run_exitfuncs()  # processes of trackers and compilers
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, OSError):
            stream.flush()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:  # sockets and devices of libraries, which the new process opens anew
            with suppress(OSError):
                os.set_inheritable(int(name), False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
