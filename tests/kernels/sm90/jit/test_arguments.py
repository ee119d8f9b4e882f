"""Claim counters of captured launches: enough for every capture, and none given to two launches."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.jit import launch as jit

CPU = torch.device("cpu")


class Device:
    """Stand-in for the device that `counter_of` queries, and the memory that it takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.capture = 1, 0
        self.zeroed: list[Any] = []
        zeros = torch.zeros

        def noted(*shape: Any, **how: Any) -> torch.Tensor:
            made = zeros(*shape, **how)
            self.zeroed.append(weakref.ref(made))
            return made

        monkeypatch.setattr(torch, "zeros", noted)
        streams = torch.cuda
        monkeypatch.setattr(
            streams, "current_stream", lambda *_: SimpleNamespace(cuda_stream=self.stream)
        )
        monkeypatch.setattr(streams, "is_current_stream_capturing", lambda: self.capture > 0)
        monkeypatch.setattr(jit, "_capture_on", lambda stream: self.capture, raising=False)

    def addresses(self, launches: int) -> list[int]:
        """Addresses of the counters of launches, which hold no reference to them."""
        return [jit.counter_of(CPU).data_ptr() for _ in range(launches)]

    def blocks(self) -> list[torch.Tensor]:
        """Tensors that were zeroed and are still referenced."""
        return [block for made in self.zeroed if (block := made()) is not None]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    jit._of_stream.cache_clear()
    return Device(monkeypatch)


def test_captures_never_run_out_however_often_a_step_is_captured_again(device: Device) -> None:
    """Each launch has a counter of its own, in memory that nobody else gets meanwhile."""
    device.addresses(1)  # eager
    for capture in range(1, 31):
        device.capture, before = capture, len(device.zeroed)
        found = device.addresses(700)
        assert len(set(found)) == 700, f"capture {capture}"
        held = {b.data_ptr() + 4 * i for b in device.blocks() for i in range(b.numel())}
        assert held.issuperset(found), f"capture {capture}"
        assert len(device.zeroed) - before <= 2, "a graph zeroes its counters in blocks"
    assert len(device.blocks()) <= 3, "captures of the past keep some"


def test_each_stream_of_a_capture_zeroes_its_own(device: Device) -> None:
    """Work on another stream may begin before what was zeroed on this one."""
    device.capture = 1
    found = []
    for stream in (1, 2, 1, 2):
        device.stream = stream
        found += device.addresses(3)
    assert len(device.zeroed) == 2 and len(set(found)) == 12


def test_eager_launches_of_a_stream_share_one(device: Device) -> None:
    assert len(set(device.addresses(3))) == 1
    device.stream = 2
    assert len(set(device.addresses(3))) == 1 and len(device.zeroed) == 2
