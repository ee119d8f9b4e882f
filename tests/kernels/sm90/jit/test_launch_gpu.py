"""Launches on a Hopper GPU: results, streams, threads, capture, and every shipped kernel loads."""

import threading

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.cache import statistics
from phalanx.kernels.sm90.jit import launch as device
from phalanx.kernels.sm90.jit.shipped import SHIPPED
from tests.kernels.sm90.echo import EchoConfig, EchoKernel

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / "kernels"
    monkeypatch.setenv("PHALANX_KERNEL_CACHE", str(folder))


def echo(first: int, second: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor of one element, first + second."""
    out = torch.full((1,), -1, dtype=torch.int32, device="cuda") if out is None else out
    device.launch(EchoKernel, EchoConfig(), a=out, b=None, blocks=1, first=first, second=second)
    return out


@pytest.mark.parametrize("number", range(len(SHIPPED)), ids=lambda n: str(SHIPPED[n][1]))
def test_shipped_kernels_load(number):
    device.prepare(*SHIPPED[number], torch.device("cuda", 0))


def test_numbers_arrive():
    assert echo(2**30, 41).item() == 2**30 + 41
    assert echo(-7, 3).item() == -4


def test_the_current_stream_is_used():
    side, out = torch.cuda.Stream(), torch.zeros(1, dtype=torch.int32, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        out.fill_(5)
        echo(1, 2, out)
    side.synchronize()
    assert out.item() == 3  # after the fill, hence on the side stream


def test_captured_after_prepare():
    config = EchoConfig(96)  # nobody else's
    device.prepare(EchoKernel, config, torch.device("cuda", 0))
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.launch(EchoKernel, config, a=out, b=None, blocks=1, first=20, second=22)
    assert out.item() == 0
    graph.replay()
    assert out.item() == 42


def test_threads_and_the_backward_pass():
    class Echo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * echo(1, 1)

        @staticmethod
        def backward(ctx, dy):
            return dy * echo(2, 1)

    x = torch.ones(1, device="cuda", requires_grad=True)
    Echo.apply(x).sum().backward()
    assert x.grad.item() == 3

    results: dict[int, list[torch.Tensor]] = {}

    def many(tag: int) -> None:
        results[tag] = [echo(tag, i) for i in range(500)]

    threads = [threading.Thread(target=many, args=(1000 * tag,)) for tag in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tag, outs in results.items():
        assert torch.cat(outs).tolist() == [tag + i for i in range(500)]


def test_compiled_once_whatever_is_launched():
    echo(1, 1)
    before = statistics()
    for i in range(10):
        echo(i, 1)
    assert statistics() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    out = torch.zeros(1, dtype=torch.int32, device="cuda:1")
    assert echo(4, 5, out).item() == 9
    assert torch.cuda.current_device() == 0
