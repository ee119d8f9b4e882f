"""The torch_dist part of a save: plan, write (here or in a forked process), finish.

From a sharded state dict to a complete but uncommitted folder; parallel.checkpoint.commit commits
it. When `finish` returns, every shard is on disk, or uploaded, and has a checksum. An error of one
rank is raised on all.

A background save copies shards to shared host memory (`Staging`), which is all that training waits
for. The fork reads just what was copied, so that neither process copies pages on write, and nothing
is written to the memory while a writer may read it.
"""

import ctypes
import io
import logging
import mmap
import os
import pickle
import signal
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import memset
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)
from torch.utils.serialization import config as serialization

from phalanx.parallel.checkpoint.commit import Sums
from phalanx.parallel.checkpoint.upload import upload
from phalanx.parallel.fault.agreement import agree, failing_together, gather
from phalanx.parallel.fault.signals import end_with_parent
from phalanx.parallel.megatron.patches import results_to
from phalanx.parallel.object_store import Remote

_ALIGN = 512  # bytes; whole cache lines, and any dtype
_THREADS = 8  # most threads of a rank that clear pages


class Staging:
    """Host memory of the size of this rank's share, kept from save to save: pinning it is slow."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._unpin: weakref.finalize | None = None

    def hold(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `tensors`, valid until the next call, in memory that forked processes share.

        Returns:
            Contiguous CPU tensors of the same shapes and dtypes, each with a storage of its own
            size.

        Raises:
            OSError: there is not enough memory.
            RuntimeError: CUDA cannot pin it.
        """
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        cuda = any(tensor.is_cuda for tensor in tensors)
        memory = self._reserve(size, pinned=cuda)
        copies = [_at(memory, start, like) for start, like in zip(starts, tensors, strict=True)]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if cuda:
            torch.cuda.current_stream().synchronize()
        return copies

    def _reserve(self, size: int, pinned: bool) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            if self._unpin is not None:
                self._unpin()
            self._memory = mmap.mmap(-1, max(size, 1))  # anonymous and shared
            self._unpin = pin(self, self._memory) if pinned else None
        return self._memory


def _at(memory: mmap.mmap, start: int, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    if not size:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
    return whole.view(like.dtype).view(like.shape)


def _touch(address: int, size: int) -> None:
    """Clear `size` bytes at `address` by several threads; CUDA's one would do 1 to 2 GB/s."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, min(_THREADS, len(os.sched_getaffinity(0)) // ranks))
    part = max(1, -(-size // threads))
    with ThreadPoolExecutor(threads) as pool:
        # ctypes releases the interpreter's lock.
        list(pool.map(lambda i: memset(address + i, 0, min(part, size - i)), range(0, size, part)))


def pin(owner: object, memory: mmap.mmap) -> weakref.finalize:
    """Pin memory, after it is cleared, until `owner` is gone or the result is called."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    _touch(address, len(memory))
    pin_memory(address, len(memory))
    undo = weakref.finalize(owner, unpin_memory, address)
    undo.atexit = False  # the driver may be gone by then
    return undo


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
        `queue` calls `then` once all ranks have written. Raises Failed if a rank could not copy.
        """
        request = AsyncRequest(None, (), [then])
        with failing_together(OSError, RuntimeError):
            if self._request.async_fn is not None:
                held = _staged(self._buckets, staging)
                request = AsyncRequest(_write_in_fork, (self._mailbox, held, self._to), [then])
        with without_output():  # of a fork with threads: the child only writes files
            queue.schedule_async_request(request)

    def finish(self) -> Sums:
        """Add the metadata files, and return all ranks' sums; Failed if a rank has not written."""
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

    It stands in for Megatron-Core's results queue, by `get_nowait`.
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
    this takes the rest, and raises when it is left.
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

        By itself it begins after seconds or with gigabytes: fsync would wait for nearly the whole
        file. Some file systems do not offer this: fsync, which follows, reports errors.
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
