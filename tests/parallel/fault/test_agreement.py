"""Results and errors of a rank reach all ranks."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.parallel.fault.agreement import Failed, failing_together, on_main
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


def _failed_on(ranks: set[int]) -> str:
    try:
        with failing_together(OSError, LookupError, text=lambda error: f"no: {error}"):
            if dist.get_rank() in ranks:
                full()
            return "done"
    except Failed as failed:
        return str(failed)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "text"),
    [(set(), "done"), ({0}, "no: no space"), ({1}, "no: no space (rank 1)")],
)
def test_all_ranks_go_on_or_fail(ranks: set[int], text: str) -> None:
    assert run_distributed(_failed_on, 2, ranks, timeout=20) == [text] * 2


def _mistaken() -> str:
    with pytest.raises(LookupError, match="what went wrong"), failing_together(OSError):
        wrong()
    return "raised"


@pytest.mark.dist
def test_a_mistake_is_raised_as_it_is() -> None:
    assert run_distributed(_mistaken, 2, timeout=20) == ["raised"] * 2
