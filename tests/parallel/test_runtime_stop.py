"""The end of a rank: shared memory goes before the process groups, whatever the others do."""

import functools
import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel import runtime
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher import exchange
from tests.support.distributed import run_distributed


class Stub:
    """An exchange that tells when its memory is given back."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.group, self._name, self._events = dist.group.WORLD, name, events

    def begin(self) -> None: ...

    def missing(self) -> str:
        return ""

    def release(self) -> None:
        self._events.append(f"{self._name} released, groups {dist.is_initialized()}")


def _stopped(device_failed: bool = False) -> tuple[list[str], int, float]:
    """End of a rank; rank 1 is gone by then."""
    events: list[str] = []
    dist.barrier()  # or rank 0 could close a connection that rank 1 has yet to establish
    if dist.get_rank() == 1:
        return events, 0, 0.0

    def synchronize() -> None:
        events.append("device done")
        if device_failed:
            raise RuntimeError("CUDA error: unspecified launch failure")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", synchronize)
        here = runtime.Runtime(0, 2, 0, torch.device("cpu"))
        kept = here.connections
        for name in ("first", "second"):
            kept.get(name, functools.partial(Stub, name, events))
        assert kept in Connections.unreleased
        began = time.monotonic()
        try:
            runtime.stop(here)
        except RuntimeError as error:
            events.append(str(error))
        events.append(f"groups {dist.is_initialized()}")
        assert (kept in Connections.unreleased) == device_failed
        return events, len(kept), time.monotonic() - began


@pytest.mark.dist
def test_exchanges_are_released_before_groups_and_wait_for_no_dead_rank() -> None:
    events, left, seconds = run_distributed(_stopped, 2, timeout=60)[0]
    assert events == [
        "device done",
        "first released, groups True",
        "second released, groups True",
        "groups False",
    ]
    assert not left and seconds < 20


@pytest.mark.dist
def test_a_device_that_failed_keeps_its_memory_and_the_groups_go() -> None:
    """Freeing would fail again, in a destructor, which ends the process without a word."""
    events, left, _ = run_distributed(_stopped, 2, True, timeout=60)[0]
    failed = "CUDA error: unspecified launch failure"
    assert events == ["device done", failed, "groups False"] and left == 2


def test_memory_does_not_go_with_the_last_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destructor could fail after the device has; only `release` gives the memory back."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    before = set(Connections.unreleased)
    connections = Connections()
    stub = weakref.ref(connections.get("a", lambda: Stub("first", [])))
    del connections
    gc.collect()
    assert stub() is not None
    (left,) = Connections.unreleased - before
    left.release()
    assert stub() is None and Connections.unreleased == before


def _ended(dies: bool) -> float:
    """Seconds that rank 0 takes to end where rank 1 comes half a second later, or never."""
    rank = dist.get_rank()
    here = runtime.Runtime(rank, dist.get_world_size(), rank, torch.device("cpu"))
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_PATIENCE", 0.25 if dies else 20.0)
        if rank == 1:
            time.sleep(0.5)
        if rank == 0 or not dies:
            runtime.end(here)
    return time.monotonic() - began


@pytest.mark.dist
def test_a_rank_ends_when_all_others_do() -> None:
    first, second = run_distributed(_ended, 2, False, timeout=60)
    assert first > 0.3 and second >= 0.5 and first < 5  # they begin some hundredths apart


@pytest.mark.dist
def test_a_rank_that_never_ends_is_not_waited_for_long() -> None:
    assert run_distributed(_ended, 2, True, timeout=60)[0] < 5


def test_an_exchange_gives_its_memory_back_though_something_refers_to_it() -> None:
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.exchange.exchange import Exchange

    made: Any = object.__new__(Exchange)
    made._memory = torch.zeros(64, dtype=torch.uint8)
    made._ready_words = {2: made._memory[:8]}
    made._rows, made._side = [made._memory[:32]], [made._memory[32:]]
    memory, handle = weakref.ref(made._memory), Stub("handle", [])
    connection: Any = object.__new__(exchange.Connection)
    connection.exchange, connection._handle = made, handle
    of_handle = weakref.ref(handle)
    del handle
    connection.release()
    assert memory() is None and of_handle() is None
