"""Results and errors of rank 0 reach all ranks."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.parallel.fault.agreement import Failed, on_main
from tests.support.distributed import run_distributed


def wrong() -> None:
    raise LookupError("what went wrong")


def full() -> None:
    raise OSError("no space")


def _raised(what: str) -> tuple[type, str]:
    fn: Any = {"lookup": wrong, "full": full, "unpicklable": threading.Lock}[what]
    try:
        on_main(fn)
    except Exception as error:
        dist.barrier()  # nobody is left behind in the broadcast
        return type(error), str(error)
    raise AssertionError("no error")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("lookup", LookupError, "LookupError: what went wrong"),
        ("unpicklable", TypeError, "TypeError: cannot pickle"),
        ("full", Failed, "no space"),
    ],
)
def test_an_error_of_rank_0_is_raised_on_all(what: str, kind: type, text: str) -> None:
    first, second = run_distributed(_raised, 2, what, timeout=20)
    assert first[0] is kind and first[1][:10] in text
    assert second[0] is Failed and second[1].startswith(text)


def _answer() -> list[Any]:
    return [on_main(lambda: {"rank": dist.get_rank()}), on_main(lambda: None)]


@pytest.mark.dist
def test_a_result_reaches_all() -> None:
    assert run_distributed(_answer, 2) == [[{"rank": 0}, None]] * 2
