"""The torch_dist part of a save: plan, write (here or in a forked process), finish.

From a sharded state dict to a complete but uncommitted folder; parallel.checkpoint.commit commits
it. When `finish` returns, every shard is on disk, or uploaded, and has a checksum. An error of one
rank is raised on all.
"""

import ctypes
import io
import logging
import os
import pickle
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)
from torch.utils.serialization import config as serialization

from phalanx.parallel.checkpoint.commit import Sums
from phalanx.parallel.checkpoint.host_buffer import Staging
from phalanx.parallel.checkpoint.upload import upload
from phalanx.parallel.fault.agreement import agree, failing_together, gather
from phalanx.parallel.fault.signals import end_with_parent
from phalanx.parallel.megatron.patches import results_to
from phalanx.parallel.object_store import Remote

_BLOCK = 1 << 25  # bytes after which the disk begins with them
_SYNC_FILE_RANGE_WRITE = 2  # fcntl.h of Linux
# Found before a fork, in which a thread may have held the linker's lock.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class Writing:
    """One checkpoint on its way to `folder`.

    Args:
        state: sharded state dict; consumed.
        folder: empty, on a file system that all ranks share, or of this rank if it uploads.
        strategy: Megatron-Core's save strategy.
        validate: check that the shards of all ranks make up every tensor exactly once.
        to: prefix in an object store that shards are uploaded to.
    """

    def __init__(
        self,
        state: dict[str, Any],
        folder: Path,
        strategy: Any,
        validate: bool,
        to: Remote | None = None,
    ) -> None:
        self._mailbox, self._to = _Mailbox(), to
        with results_to(self._mailbox), without_output():
            self._request = dist_checkpointing.save(
                state,
                str(folder),
                strategy,
                validate_access_integrity=validate,
                async_sharded_save=True,
                async_strategy="mcore",
            )
        if self._request.async_fn is None:  # nothing for this rank to write
            self._mailbox.put({}, {})
        else:
            self._buckets: list[Any] = self._request.async_fn_args[1]

    def run(self) -> None:
        """Write this rank's shards now, one tensor at a time; `finish` tells what went wrong."""
        if self._request.async_fn is not None:
            _write(self._mailbox, self._buckets, self._to)

    def fork(self, staging: Staging, queue: AsyncCallsQueue, then: Callable[[], None]) -> None:
        """Copy this rank's shards to `staging` and write them in a forked process.

        The fork has no thread but its own, never calls CUDA, and collects no garbage, which could.
        `then` is called by `queue` once all ranks have written.

        Raises:
            Failed: a rank could not copy them.
        """
        request = AsyncRequest(None, (), [then])
        with failing_together(OSError, RuntimeError):
            if self._request.async_fn is not None:
                held = _staged(self._buckets, staging)
                request = AsyncRequest(_write_in_fork, (self._mailbox, held, self._to), [then])
        with without_output():  # of a fork with threads: the child only writes files
            queue.schedule_async_request(request)

    def finish(self) -> Sums:
        """Add the metadata files. Returns the sums of all shards, of all ranks.

        Raises:
            Failed: a rank could not write.
        """
        agree(self._mailbox.failure())
        # In each of these rank 0 writes a file before a collective; if it fails it must join that.
        steps = zip(self._request.finalize_fns, (_report_failure, dist.barrier), strict=True)
        for step, rejoin in steps:
            agree(_attempt(step, rejoin))
        return {name: sums for part in gather(self._mailbox.sums()) for name, sums in part.items()}


@contextmanager
def without_output() -> Iterator[None]:
    """Without what torch and Megatron-Core warn of on every rank about the choices made here."""
    target = logging.getLogger("megatron.core.dist_checkpointing")
    level = target.level
    target.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        target.setLevel(level)


class _Mailbox:
    """Results (or the failure) and checksums that the writer reports, from this process or a fork.

    Megatron-Core calls `get_nowait`: this stands in for its results queue.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._report: tuple[Any, Sums] | None = None
        self._file = os.fdopen(os.memfd_create("checkpoint"), "w+b")  # memory that forks share

    def put(self, results: dict[int, Any] | str, sums: Sums) -> None:
        self._report = (results, sums)
        if os.getpid() != self.owner:
            pickle.dump(self._report, self._file)
            self._file.flush()

    def get_nowait(self) -> dict[int, Any]:
        return self._read()[0]

    def failure(self) -> str | None:
        results = self._read()[0]
        return results if isinstance(results, str) else None

    def sums(self) -> Sums:
        return self._read()[1]

    def _read(self) -> tuple[Any, Sums]:
        if self._report is None:
            self._file.seek(0)
            try:
                self._report = pickle.load(self._file)
            except EOFError:
                self._report = ("the background writer was killed", {})
        return self._report


def _write(mailbox: _Mailbox, buckets: list[Any], to: Remote | None) -> None:
    """Write the files that Megatron-Core planned: (path, name, (objects, tensors)) each."""
    plain, torch_save = _StorageWriterTransforms(), SerializationFormat.TORCH_SAVE
    results: dict[int, Any] = {}
    sums: Sums = {}
    try:
        for i, (path, name, (objects, tensors)) in enumerate(buckets):
            # `_File` sums all bytes, four times as fast as torch.save does each tensor.
            without_sums = serialization.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
            with _File(path) as file, without_sums:
                results[i] = [
                    _write_item(plain, cast(io.IOBase, file), data, item, name, torch_save)
                    for item, data in chain(objects, ((item, t.cpu()) for item, t in tensors))
                ]
            sums[name] = file.sums
        if to is not None:
            upload([Path(path) for path, *_ in buckets], to, apart=os.getpid() != mailbox.owner)
    except Exception as error:  # reported by `finish`, on all ranks
        return mailbox.put(str(error) if isinstance(error, OSError) else repr(error), {})
    mailbox.put(results, sums)


def _write_in_fork(mailbox: "_Mailbox", buckets: list[Any], to: Remote | None) -> None:
    """Write, and end with the process that wants it: what it left could not be committed."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() == mailbox.owner:
        _write(mailbox, buckets, to)


def _staged(buckets: list[Any], staging: Staging) -> list[Any]:
    copies = iter(staging.hold([t for _, _, (_, tensors) in buckets for _, t in tensors]))
    return [
        (path, name, (objects, [(item, next(copies)) for item, _ in tensors]))
        for path, name, (objects, tensors) in buckets
    ]


class _File:
    """A new file that is written in sequence and sums what it is given.

    torch corrupts memory when a write fails inside torch.save (seen with 2.11). So after an OSError
    this takes the rest without a word, and raises when it is left.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb")
        self._error: OSError | None = None
        self._begun = 0
        self.sums = (0, 0)

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        self.sums = (self.sums[0] + length, zlib.crc32(data, self.sums[1]))
        if self._error is None:
            try:
                self._file.write(data)
                if self.sums[0] - self._begun >= _BLOCK:
                    self._begin_writing()
            except OSError as error:
                self._error = error
        return length

    def _begin_writing(self) -> None:
        """Let the kernel write to the disk what it has, beside what is still to come.

        By itself it begins after seconds or with gigabytes, so that fsync would wait for nearly the
        whole file. Some file systems do not offer this: fsync, which follows, reports errors.
        """
        self._file.flush()
        if _sync_file_range is not None:
            _sync_file_range(self._file.fileno(), self._begun, 0, _SYNC_FILE_RANGE_WRITE)
        self._begun = self.sums[0]

    def tell(self) -> int:
        return self.sums[0]

    def flush(self) -> None: ...

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            with self._file:
                if self._error is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise self._error


def _attempt(step: Callable[[], None], rejoin: Callable[[], object]) -> str | None:
    try:
        step()
    except OSError as error:
        rejoin()
        return str(error)
    except CheckpointException:
        return ""
    return None


def _report_failure() -> None:
    # The verdict that the other ranks wait for in Megatron-Core's save_state_dict_async_finalize.
    verdict = torch.ones(1, dtype=torch.int, device=torch.cuda.current_device())
    dist.broadcast(verdict, src=0)
