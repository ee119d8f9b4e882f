"""Private files of a rank whose job fails: Python stacks and the record of its collectives."""

import faulthandler
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import torch.distributed as dist

from phalanx.configs.redact import redacted
from phalanx.parallel.fault.activity import current_progress
from phalanx.parallel.fault.private_files import make_private, open_private
from phalanx.parallel.fault.verdict import Where


def write(folder: Path, rank: int, verdict: str, error: Exception | None) -> None:
    """Write this rank's files, without secrets, or tell why they cannot be written.

    `verdict` says why the job ends, `error` is what this rank has raised, if anything.
    """
    stack = "" if error is None else "".join(traceback.format_exception(error))
    head = redacted(f"{verdict}\n\nrank {rank} was in {current_progress().at}\n{stack}")
    try:
        make_private(folder)
        with open_private(folder / f"rank_{rank}.txt", "w", encoding="utf-8") as file:
            print(head, file=file, flush=True)
            faulthandler.dump_traceback(file)
            with _stderr_to(file):
                record = _flight_record(broken="CUDA error" in stack)
        with open_private(folder / f"rank_{rank}.collectives.json", "wb") as file:
            file.write(record)
    except OSError as problem:
        print(f"rank {rank}: stacks not written: {problem}", file=sys.stderr, flush=True)


@contextmanager
def _stderr_to(file: IO[str]) -> Iterator[None]:
    """Write what torch says by itself to a file: a page for each collective of a captured step."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _flight_record(broken: bool) -> bytes:
    """The last TORCH_FR_BUFFER_SIZE collectives of the job's backend, by torch's flight recorder.

    A `broken` device cannot be asked which of NCCL's have ended.
    """
    from torch._C import _distributed_c10d as c10d

    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    try:
        if nccl and broken:
            raise RuntimeError("not known after a CUDA error")
        dump = "_dump_nccl_trace_json" if nccl else "_dump_fr_trace_json"
        return getattr(c10d, dump)()
    except RuntimeError as error:
        return json.dumps({"entries": [], "error": str(error)}).encode()


def end_stopped(folder: Path, where: Where) -> None:
    """Kill a process of this job that does not answer, if it is on this host.

    A stopped process would keep its GPU, and the launcher waiting.
    """
    try:
        process = psutil.Process(where.pid)
        same = abs(process.create_time() - where.born) < 1  # and not a later one of this number
        if where.host != socket.gethostname() or not same:
            return
        note = f"{where} did not answer, so its stack is unknown; it was {process.status()}\n"
        process.kill()
        with open_private(folder / f"rank_{where.rank}.txt", "w", encoding="utf-8") as file:
            file.write(note)
    except (psutil.Error, OSError):
        pass  # another rank of this host was faster, or the process is not there
