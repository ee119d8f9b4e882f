"""Ranks that succeed or fail together: what one could not do, all know before any goes on.

Host-side and rare (start, checkpoints): everything here is a collective over the whole job.
"""

import ctypes
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Failed(RuntimeError):
    """Some rank failed; raised on every rank with the same message."""


def gather[T](value: T) -> list[T]:
    """`value` of every rank, in rank order. A process without a process group is a world of one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]  # through a process group it would wait for the device
    return _all_gather(value)


def agree(error: str | None) -> None:
    """Go on if no rank has an `error`; an empty one is of a rank that stopped because of another.

    Raises `Failed` with the first error and its rank.
    """
    errors = {rank: e for rank, e in enumerate(gather(error)) if e is not None}
    if errors:
        reported = {rank: e for rank, e in errors.items() if e} or errors
        rank, first = next(iter(reported.items()))
        raise Failed(first if rank == 0 else f"{first} (rank {rank})")


@contextmanager
def failing_together(
    *errors: type[BaseException], text: Callable[[BaseException], str] = str
) -> Iterator[None]:
    """Context of work of every rank, at whose end all ranks go on, or all raise `Failed`.

    Args:
        errors: exceptions by which a rank fails; others are mistakes, which only that rank raises.
        text: makes an exception's message; that of the first failing rank is raised.
    """
    failure = None
    try:
        yield
    except errors as error:
        failure = text(error)
    agree(failure)


def on_main[T](fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0 and return its (picklable) result on every rank.

    Raises:
        Failed: rank 0 got an error, whose message it has. If that is no OSError, it is a mistake,
            such as a result that cannot be pickled, and rank 0 raises the error itself with its
            traceback.
    """
    answer: list[Any] = [b"", None]
    mistake: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = pickle.dumps(fn())
        except OSError as error:
            answer[1] = str(error)
        except Exception as error:
            mistake = error
            answer[1] = "".join(traceback.format_exception_only(error)).rstrip()
    answer = _broadcast(answer)
    if mistake is not None:
        raise mistake
    if answer[1] is not None:
        raise Failed(answer[1])
    return pickle.loads(answer[0])


# Collectives of objects: those of torch.distributed need NumPy, which torch does not install.


def _all_gather(value: Any) -> list[Any]:
    mine = _encoded(value)
    size = torch.tensor([len(mine)], device=_device())
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(size) for size in sizes]
    padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded)
    return [_decoded(data[:n]) for data, n in zip(found, lengths, strict=True)]


def _broadcast(value: Any) -> Any:
    mine = _encoded(value) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(mine)], device=_device())
    dist.broadcast(size, src=0)
    data = mine if dist.get_rank() == 0 else mine.new_empty(int(size), device=_device())
    dist.broadcast(data, src=0)
    return _decoded(data)


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(_device())


def _decoded(data: Tensor) -> Any:
    here = data.cpu().contiguous()
    return pickle.loads(ctypes.string_at(here.data_ptr(), len(here)))


def _device() -> str:
    """Type of the device whose tensors the job's collectives take; the host's if they do."""
    return "cpu" if "cpu" in dist.get_backend_config() else "cuda"
