"""Host memory of an exact size that a GPU copies from and to.

torch's pinned memory comes in powers of two. This is anonymous memory, in huge pages where the
kernel has some, cleared by several threads and pinned at once. Processes that are forked
(background checkpoints) do not see it: no page that a GPU writes to may be copied on write.
"""

import mmap

import torch
from torch import Tensor

from phalanx.parallel.checkpoint.writer import pin


def zeros(size: int, pinned: bool, owner: object) -> Tensor:
    """Zeros on the host, uint8 [size], pinned until `owner` is gone.

    Raises:
        MemoryError: the host has not enough memory.
        RuntimeError: CUDA cannot pin it.
    """
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        reason = f"no {size / 2**30:.1f} GiB of host memory for states of the optimizer: {error}"
        raise MemoryError(reason) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Linux has both, in most kernels
        try:
            memory.madvise(getattr(mmap, advice))
        except (AttributeError, OSError):
            continue
    if pinned:
        pin(owner, memory)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size)
