"""Host memory of an exact size that a GPU copies from and to.

torch's pinned memory comes in powers of two. This is anonymous memory, in huge pages where the
kernel has some, cleared by several threads and pinned at once. Processes that are forked
(background checkpoints) do not see it: no page that a GPU writes to may be copied on write.
"""

import mmap

import torch
from torch import Tensor

from phalanx.moe.text import storage
from phalanx.parallel.checkpoint.writer import pin


def zeros(size: int, pinned: bool, owner: object) -> Tensor:
    """Zeros on the host, uint8 [size], pinned until `owner` is gone.

    Raises:
        ValueError: the host has not enough memory, or CUDA cannot pin it.
    """
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            _advise(memory, advice)
        if pinned:
            pin(owner, memory)
    except (OSError, RuntimeError) as error:
        wanted = f"{storage(size)} of {'pinned ' * pinned}host memory for states of the optimizer"
        helps = "set optim.moments=bf16, or use more hosts"
        raise ValueError(f"cannot have {wanted} ({error}): {helps}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def _advise(memory: mmap.mmap, advice: str) -> None:
    """Tell the kernel, if it knows the advice: those of Linux do, in most builds."""
    try:
        memory.madvise(getattr(mmap, advice))
    except (AttributeError, OSError):
        return
