"""Host memory for background saves: filled by this process, written to disk by its fork.

Where: between planning a save and forking its writer; the only copy that training waits for.
Invariants: the memory is shared, so the fork reads just what was copied and neither process copies
pages on write; it is kept from save to save, since pinning it takes longer than filling it; nothing
is written to it while a writer may read it (the checkpointer ends one save before the next).
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memset

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

_ALIGN = 512  # bytes; whole cache lines, and any dtype
_THREADS = 8  # most threads of a rank that clear pages


class Staging:
    """Grows to the size of this rank's share of a checkpoint, and stays."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._unpin: weakref.finalize | None = None

    def hold(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `tensors`, valid until the next call.

        Args:
            tensors: of any device, dtype and stride.

        Returns:
            Contiguous CPU tensors of the same shapes and dtypes, each with a storage of its own
            size, in memory that forked processes share. The copies are complete.

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
            self._unpin = _pin(self, self._memory) if pinned else None
        return self._memory


def _at(memory: mmap.mmap, start: int, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    if not size:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
    return whole.view(like.dtype).view(like.shape)


def _touch(address: int, size: int) -> None:
    """Clear `size` bytes at `address` by several threads.

    A page is cleared when it is first touched. CUDA would do that with one thread, at 1 to 2 GB/s.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, min(_THREADS, len(os.sched_getaffinity(0)) // ranks))
    part = max(1, -(-size // threads))
    with ThreadPoolExecutor(threads) as pool:
        # ctypes releases the interpreter's lock.
        list(pool.map(lambda i: memset(address + i, 0, min(part, size - i)), range(0, size, part)))


def _pin(owner: Staging, memory: mmap.mmap) -> weakref.finalize:
    """Let CUDA copy to the memory directly, until `owner` is gone or what is returned is called."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    _touch(address, len(memory))
    pin_memory(address, len(memory))
    undo = weakref.finalize(owner, unpin_memory, address)
    undo.atexit = False  # the driver may be gone by then
    return undo
