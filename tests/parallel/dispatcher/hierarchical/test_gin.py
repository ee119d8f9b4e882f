"""The rail's engine `gin`: what it needs, what it hands to its kernel, which compiles.

Its exchange has no test here: it needs GPUs of several nodes.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.rail import gin
from phalanx.parallel.dispatcher.rail.collective import RowCounts, swap
from phalanx.parallel.dispatcher.rail.gin import INSTALL, GinRail, refuse


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has all that is needed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gin, "_library", lambda: gin.NCCL)
    monkeypatch.setattr(gin, "version", lambda _: gin.PACKAGE)


def test_what_is_missing_is_said_with_the_line_that_installs_it(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise gin.PackageNotFoundError(name)

    assert refuse() is None
    monkeypatch.setattr(gin, "_library", lambda: "2.28.9")
    assert refuse() == f"needs NCCL 2.32.3, and this process has 2.28.9: {INSTALL}"
    monkeypatch.setattr(gin, "version", lambda _: "0.5.0")
    assert refuse() == f"needs nccl4py 0.6.0, not 0.5.0: {INSTALL}"
    monkeypatch.setattr(gin, "version", missing)
    assert refuse() == f"needs nccl4py: {INSTALL}"
    group: Any = None
    with pytest.raises(ValueError, match="^parallel.rail=gin needs nccl4py: pip install ") as told:
        GinRail(group, Connections(), 1)
    assert "\n" not in str(told.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refuse() == "needs CUDA"


class _Group:
    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def size(self) -> int:
        return self.nodes


class _Connection:
    """Swaps the blocks of two nodes."""

    def __init__(self, group: Any, limit_ms: int) -> None:
        self.counts: list[RowCounts | None] = []

    def exchange(self, rows: Tensor, counts: RowCounts | None) -> Tensor:
        assert rows.dtype == torch.uint8 and rows.is_contiguous() and rows.shape[1] % 16 == 0
        self.counts.append(counts)
        return rows.view(2, -1, rows.shape[1]).flip(0).flatten(0, 1)

    def begin(self) -> None: ...

    def release(self) -> None: ...

    def missing(self) -> str:
        return ""


def test_rows_of_any_size_and_dtype_are_swapped(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 6 fp32 or 2 x 3 int32 are padded to 32 bytes, and come back as they were."""
    monkeypatch.setattr(gin, "_Connection", _Connection)
    connections, group = Connections(), _Group(2)
    first, second = (GinRail(group, connections, 5) for _ in range(2))  # type: ignore[arg-type]
    assert first._connection is second._connection and len(connections) == 1
    counts = RowCounts(*torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    for shape, dtype in (
        ((8, 6), torch.float32),
        ((8, 2, 3), torch.int32),
        ((8, 24), torch.bfloat16),
        ((8, 272), torch.uint8),
    ):
        blocks = torch.randint(100, shape).to(dtype)
        received = swap(first, blocks, counts)
        assert received.dtype == dtype
        assert torch.equal(received, torch.cat((blocks[4:], blocks[:4])))
    assert first._connection.counts == [counts] * 4
    with pytest.raises(ValueError, match="serves 32 nodes, not 33: set parallel.rail=collective"):
        GinRail(_Group(33), connections, 5)  # type: ignore[arg-type]


def test_the_version_is_that_of_the_library_which_is_loaded() -> None:
    pytest.importorskip("nccl.core", reason="needs phalanx[gin]")
    assert gin._library() == gin.NCCL


def test_counts_of_the_way_back() -> None:
    counts = RowCounts(*torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    assert counts.back.sent_M.tolist() == [3, 4] and counts.back.arriving_M.tolist() == [1, 2]


@pytest.mark.parametrize("nodes", [2, 8])
def test_the_kernel_compiles_without_a_gpu(nodes: int) -> None:
    pytest.importorskip("nccl.core.device.cute", reason="needs phalanx[gin]")
    from phalanx.parallel.dispatcher.rail.gin_kernel import GinConfig, compile_for

    assert callable(compile_for(GinConfig(nodes, nodes - 1), "sm_90a"))
