"""A slow network between pretended nodes: bytes that cross, waits on a CPU, kernels for a GPU."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.extras.overlap.paced import gathered, swapped, wire
from phalanx.kernels import timer_triton
from phalanx.parallel.dispatcher.alltoall import all_rows, sum_to_owner
from phalanx.parallel.dispatcher.collectives import Collectives
from tests.kernels.triton_code import launched
from tests.support.distributed import run_distributed


def test_bytes_that_cross() -> None:
    x = torch.zeros(16, 4)
    assert gathered(x, 2, 1) == x.nbytes and swapped(x, 2, 1) == x.nbytes / 2
    assert gathered(x, 16, 8) == x.nbytes and swapped(x, 16, 4) == x.nbytes * 3 / 4
    assert gathered(x, 8, 8) == swapped(x, 8, 8) == 0


@pytest.mark.parametrize("text", ["fast", "1e9", "0,1e-6", "1e9,-1", "inf,0", "1e9,1e-6,3"])
def test_a_wire_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_WIRE", text)
    with pytest.raises(ValueError, match=f"PHALANX_WIRE={text} must be bytes a second"):
        wire()


def _seconds(node_gpus: str, network: str) -> tuple[float, float]:
    """Time of an all-gather and of an all-to-all of 1 MB a rank, which must give the right rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = Collectives(lambda: dist.group.WORLD)
    os.environ |= {"PHALANX_NODE_GPUS": node_gpus, "PHALANX_WIRE": network}
    try:
        x = torch.full((ranks, 125_000), float(rank))
        began = time.monotonic()
        rows = all_rows(x, world)
        then = time.monotonic()
        sums = sum_to_owner(x, world)
        ended = time.monotonic()
    finally:
        del os.environ["PHALANX_NODE_GPUS"], os.environ["PHALANX_WIRE"]
    assert torch.equal(rows[:, 0], torch.arange(ranks).repeat_interleave(ranks).float())
    assert sums.eq(sum(range(ranks))).all()
    return then - began, ended - then


@pytest.mark.dist
def test_collectives_between_nodes_take_the_time_of_the_wire() -> None:
    for gather, swap in run_distributed(_seconds, 2, "1", "4e6,0.01"):
        assert gather >= 0.01 + 0.25 and swap >= 0.01 + 0.125
    for times in run_distributed(_seconds, 2, "2", "4e6,0.01"):  # one node
        assert max(times) < 0.1


@pytest.mark.gpu
def test_a_stream_waits_in_each_replay() -> None:
    graph, device = torch.cuda.CUDAGraph(), torch.device("cuda")
    timer_triton.wait_after(timer_triton.stamp(device), 0.0)  # compiled before the capture
    with torch.cuda.graph(graph):
        started = timer_triton.stamp(device)
        timer_triton.wait_after(started, 0.02)
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        assert 0.02 <= time.monotonic() - began < 0.1


def test_kernels_read_the_clock_again_and_again(tmp_path: Path) -> None:
    meta = torch.device("meta")
    write = launched(timer_triton, "write_clock", lambda: timer_triton.stamp(meta), tmp_path)
    assert write.ptx.count("%globaltimer") == 1

    def wait() -> None:
        timer_triton.wait_after(torch.empty(1, dtype=torch.int64, device=meta), 1e-3)

    code = launched(timer_triton, "wait_for_clock", wait, tmp_path)
    loop = code.ptx[code.ptx.index("Loop Header") :]
    assert "%globaltimer" in loop[: loop.index("bra")] and code.threads == 32
    with pytest.raises(ValueError, match="at most 2 s"):
        timer_triton.wait_after(torch.empty(1, dtype=torch.int64), 3)
