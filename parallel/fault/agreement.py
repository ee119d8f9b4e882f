"""Ranks that succeed or fail together: what one could not do, all know before any goes on.

Host-side and rare (start, checkpoints): everything here is a collective over the whole job.
"""

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from phalanx.parallel.fault import objects


class Failed(RuntimeError):
    """Some rank failed; raised on every rank with the same message."""


def gather[T](value: T) -> list[T]:
    """`value` of every rank, in rank order. A process without a process group is a world of one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]  # through a process group it would wait for the device
    return objects.all_gather(value)


def agree(error: str | None) -> None:
    """Go on if no rank has an `error`.

    An empty error is a rank that stopped because of another one's.

    Raises:
        Failed: with the first error and its rank.
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
    """Context of work of every rank, at whose end all ranks go on or all stop.

    Args:
        errors: exceptions by which a rank fails; others are mistakes, which only that rank raises.
        text: function that makes an exception's message.

    Raises:
        Failed: on every rank, with the message of the first rank that failed.
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
        Failed: rank 0 got an error, whose message it has. Of an error that is no OSError, such as
            a result that cannot be pickled, rank 0 raises the error itself: it is a mistake, and
            its traceback tells where.
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
    answer = objects.broadcast(answer)
    if mistake is not None:
        raise mistake
    if answer[1] is not None:
        raise Failed(answer[1])
    return pickle.loads(answer[0])
