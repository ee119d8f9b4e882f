"""What leaves for host memory, when its memory is free, and when it is back; copies on a CPU."""

import torch
from torch import Tensor

from phalanx.parallel.memory.offload import OffloadedGroup, Offloader


def layers(
    there: Offloader, count: int, size: int = 100
) -> tuple[list[Tensor], list[OffloadedGroup]]:
    given = [torch.arange(size) + 1000 * i for i in range(count)]
    return given, [there.send([x, x[:3]], i) for i, x in enumerate(given)]


def sizes(given: list[Tensor]) -> list[bool]:
    return [bool(x.untyped_storage().nbytes()) for x in given]


def test_all_but_the_last_is_away_and_one_comes_ahead() -> None:
    there = Offloader(torch.device("cpu"))
    given, groups = layers(there, 4)
    assert sizes(given) == [False, False, False, True]
    assert there.host.used == 4 * 800
    there.need(groups[3])  # has never been away
    assert sizes(given) == [False, False, True, True]
    there.need(groups[2])
    assert sizes(given) == [False, True, True, True]
    there.need(groups[1])
    there.need(groups[0])
    assert all(torch.equal(x, torch.arange(100) + 1000 * i) for i, x in enumerate(given))
    assert there.host.used == 0


def test_the_next_step_takes_the_same_host_memory() -> None:
    there = Offloader(torch.device("cpu"))
    for _ in range(3):
        given, groups = layers(there, 3)
        for group in reversed(groups):
            there.need(group)
        assert there.host.used == 0 and sizes(given) == [True] * 3
    assert sum(len(memory) for memory in there.host._maps) == 3 * 800


def test_micro_batches_of_a_pipeline_come_back_in_their_own_order() -> None:
    """The first that was sent is wanted first: nothing that is not wanted next comes ahead."""
    there = Offloader(torch.device("cpu"))
    (a, first), (b, second) = layers(there, 2), layers(there, 2)
    assert sizes(a) == [False, False] and sizes(b) == [False, True]
    there.need(first[1])
    assert sizes(a) == [True, True] and sizes(b) == [False, True]
    there.need(first[0])
    assert sizes(b) == [False, True]
    for group in reversed(second):
        there.need(group)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and there.host.used == 0


def test_a_storage_travels_once() -> None:
    there = Offloader(torch.device("cpu"))
    x = torch.arange(50)
    group = there.send([x, x.view(5, 10), x[::2]], 0)
    assert there.host.used == 400
    there.settle()
    assert x.untyped_storage().nbytes() == 0
    there.need(group)
    assert torch.equal(x, torch.arange(50))
