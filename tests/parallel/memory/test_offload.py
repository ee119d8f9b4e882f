"""Order in which offloaded tensors are freed and fetched; copies on a CPU."""

import torch
from torch import Tensor

from phalanx.parallel.memory.offload import OffloadedGroup, Offloader


def layers(
    offloader: Offloader, count: int, size: int = 100
) -> tuple[list[Tensor], list[OffloadedGroup]]:
    sent = [torch.arange(size) + 1000 * i for i in range(count)]
    return sent, [offloader.send([x, x[:3]], i) for i, x in enumerate(sent)]


def sizes(sent: list[Tensor]) -> list[bool]:
    return [bool(x.untyped_storage().nbytes()) for x in sent]


def test_all_but_the_last_are_freed_and_one_is_prefetched() -> None:
    offloader = Offloader(torch.device("cpu"))
    sent, groups = layers(offloader, 4)
    assert sizes(sent) == [False, False, False, True]
    assert offloader.host.used == 4 * 800
    offloader.need(groups[3])  # has not been freed
    assert sizes(sent) == [False, False, True, True]
    offloader.need(groups[2])
    assert sizes(sent) == [False, True, True, True]
    offloader.need(groups[1])
    offloader.need(groups[0])
    assert all(torch.equal(x, torch.arange(100) + 1000 * i) for i, x in enumerate(sent))
    assert offloader.host.used == 0


def test_the_next_step_takes_the_same_host_memory() -> None:
    offloader = Offloader(torch.device("cpu"))
    for _ in range(3):
        sent, groups = layers(offloader, 3)
        for group in reversed(groups):
            offloader.need(group)
        assert offloader.host.used == 0 and sizes(sent) == [True] * 3
    assert sum(len(memory) for memory in offloader.host._maps) == 3 * 800


def test_micro_batches_of_a_pipeline_return_in_any_order() -> None:
    """The group that was sent first is needed first: no other is prefetched."""
    offloader = Offloader(torch.device("cpu"))
    (a, first), (b, second) = layers(offloader, 2), layers(offloader, 2)
    assert sizes(a) == [False, False] and sizes(b) == [False, True]
    offloader.need(first[1])
    assert sizes(a) == [True, True] and sizes(b) == [False, True]
    offloader.need(first[0])
    assert sizes(b) == [False, True]
    for group in reversed(second):
        offloader.need(group)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and offloader.host.used == 0


def test_a_storage_is_copied_once() -> None:
    offloader = Offloader(torch.device("cpu"))
    x = torch.arange(50)
    group = offloader.send([x, x.view(5, 10), x[::2]], 0)
    assert offloader.host.used == 400
    offloader.settle()
    assert x.untyped_storage().nbytes() == 0
    offloader.need(group)
    assert torch.equal(x, torch.arange(50))
