"""The GPU of a rank as the driver describes it, and the speed of its matrix products."""

import math
import time
from collections.abc import Callable

import torch

from phalanx.scripts.cluster.facts import smi
from phalanx.scripts.cluster.results import Gpu

_QUERY = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
    "clocks_event_reasons.active",
)
_SLOWED_BY = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlClocksEventReasons that are faults; the power limit (0x4) is usual under load."""
_WARM = 800  # products that the driver is asked beside: more than a second on an H100
_LAUNCHES = 500  # fewer than a stream can hold
_REPEATS = {"cuda": (10, 8), "cpu": (1, 40)}
"""Products of a round, and rounds: a single one on a CPU, which another process may interrupt."""


def describe(device: torch.device, load: Callable[[], object]) -> Gpu:
    """Ask the driver about a device while it works on `load`, which does not wait for it."""
    if device.type != "cuda":
        return Gpu("CPU")
    for _ in range(_WARM):
        load()
    answers = smi(device, _QUERY)
    torch.cuda.synchronize()
    others = [d for d in range(torch.cuda.device_count()) if d != device.index]
    peers = sum(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    name = torch.cuda.get_device_name(device)
    memory = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    if len(answers) != len(_QUERY):
        return Gpu(name, peers=peers, visible=len(others) + 1, memory_gib=memory)
    driver, *numbers, reasons = answers
    clock, highest, celsius, watts = map(_number, numbers)
    slowed = reasons_of(reasons)
    visible = len(others) + 1
    return Gpu(name, driver, clock, highest, celsius, watts, slowed, peers, visible, memory)


def reasons_of(mask: str) -> list[str]:
    """Faults in a bit mask of nvidia-smi, `0x0000000000000024`; none if it is no number."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return []
    return [text for bit, text in _SLOWED_BY.items() if bits & bit]


def product(device: torch.device) -> tuple[Callable[[], object], float]:
    """A matrix product on a device, and its floating-point operations."""
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3


def tflops(device: torch.device, call: Callable[[], object], flops: float, delay: float) -> float:
    """Speed of a product in 1e12 operations a second, at the best of some rounds.

    `delay`: seconds that a round waits, to rehearse a slow rank.
    """
    products, rounds = _REPEATS[device.type]

    def calls() -> None:
        time.sleep(delay)
        for _ in range(products):
            call()

    return products * flops / shortest(device, calls, rounds) / 1e12


def launch_us(device: torch.device) -> float:
    """Microseconds in which this host launches a small kernel, at the best of some rounds.

    The device waits for the host, not the other way round: its kernels are shorter than a launch.
    """
    one = torch.zeros(1, device=device)

    def calls() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1.0)

    return shortest(device, calls, 5) / _LAUNCHES * 1e6


def shortest(device: torch.device, call: Callable[[], object], rounds: int) -> float:
    """Shortest time of a call in seconds, until its device is done, after one that is not timed."""
    best = math.inf
    for at in range(rounds + 1):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        if at:
            best = min(best, time.perf_counter() - begin)
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
