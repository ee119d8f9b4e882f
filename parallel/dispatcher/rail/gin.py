"""The rail's engine `gin`: kernels put rows into the memory of other nodes, by NCCL's device API.

It sends the blocks of the engine of collectives, but of a block only the rows that hold tokens, in
waves (`parallel.dispatcher.rail.gin_kernel`). No host thread or stream takes part; a node that does
not answer is named by the kernel that waits for it.

It needs the package nccl4py, and NCCL 2.32 in place of the version that torch pins. The memory that
others may read and write is four times the blocks: two places to send from, and two to receive in.

Legend: M nodes, C rows of a block, B = M * C rows of a rail.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.refusal import Refusal
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.rail.collective import RowCounts, Started

PACKAGE, NCCL = "0.6.0", "2.32.3"
"""Versions of nccl4py and NCCL, whose device code has to be that of the library."""
INSTALL = f"pip install 'phalanx[gin]' && pip install --no-deps nvidia-nccl-cu13=={NCCL}"
"""In two steps: pip would not replace the version of NCCL that torch pins."""
WAVES = 4
MAX_NODES = 32
"""All CTAs wait at the same time, one for each wave of a node, and so have to fit on a GPU."""
_WORD = 16
_FULL = 2**31 - 1
"""Count of a block whose rows all hold data, as a count above C means C."""


def refuse() -> Refusal:
    """Reason that this process cannot run the engine, with the line that installs it, or None."""
    if not torch.cuda.is_available():
        return "needs CUDA"
    try:
        found = version("nccl4py")
    except PackageNotFoundError:
        return f"needs nccl4py: {INSTALL}"
    if found != PACKAGE:
        return f"needs nccl4py {PACKAGE}, not {found}: {INSTALL}"
    if (loaded := _library()) != NCCL:
        return f"needs NCCL {NCCL}, and this process has {loaded}: {INSTALL}"
    return None


def _library() -> str:
    """Version of the NCCL that nccl4py calls; torch tells the one that it was built with."""
    import nccl.core as nccl

    library = nccl.get_version().libnccl
    return str(library.version) if library else "none"


class GinRail:
    """A rail of one-sided puts between GPUs.

    Args:
        group: the ranks of the rail, in the order of nodes.
        connections: memory that this process shares with others; all layers use one connection.
        limit_ms: milliseconds after which a wait for another node ends the kernel.

    Raises:
        ValueError: the engine cannot run here.
    """

    counts = True

    def __init__(self, group: dist.ProcessGroup, connections: Connections, limit_ms: int) -> None:
        if reason := refuse():
            raise ValueError(f"parallel.rail=gin {reason}")
        if group.size() > MAX_NODES:
            raise ValueError(
                f"parallel.rail=gin serves {MAX_NODES} nodes, not {group.size()}: "
                "set parallel.rail=collective"
            )
        self._connection: _Connection = connections.get(
            (group, "gin", limit_ms), lambda: _Connection(group, limit_ms)
        )

    def start(self, blocks: Tensor, counts: RowCounts | None = None) -> Started:
        """`Rail.start`; the exchange is on the current stream."""
        rows = _in_words(blocks)
        words = self._connection.exchange(rows, counts)
        received = words[:, : blocks[:1].nbytes].view(blocks.dtype).view(blocks.shape)
        return Started(received, rows, lambda: None)


def _in_words(blocks: Tensor) -> Tensor:
    """Rows as bytes [B, n], padded to a multiple of 16."""
    rows = blocks.contiguous().view(len(blocks), -1).view(torch.uint8)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % _WORD))


class _Connection:
    """Communicator, windows and counters of a rail; created by all of its ranks together."""

    def __init__(self, group: dist.ProcessGroup, limit_ms: int) -> None:
        import nccl.core as nccl
        from nccl.core import UniqueId

        from phalanx.parallel.dispatcher.rail.gin_kernel import GinConfig, compile_for

        self._group, self._limit_ms = group, limit_ms
        M, index = group.size(), group.rank()
        self._config = GinConfig(M, index, WAVES)
        device = torch.device("cuda", torch.cuda.current_device())
        told = [bytes(nccl.get_unique_id()) if index == 0 else None]
        dist.broadcast_object_list(told, group=group, group_src=0)
        assert told[0] is not None
        self._comm = nccl.Communicator.init(M, index, UniqueId.from_bytes(told[0]))
        if self._comm.gin_type == nccl.NcclGinType.NONE:
            raise ValueError(
                "parallel.rail=gin finds no network that GPUs can use: NCCL_DEBUG=INFO "
                "NCCL_DEBUG_SUBSYS=INIT,NET says why"
            )
        self._device_comm = self._comm.create_dev_comm(
            nccl.NCCLDevCommRequirements(
                gin_context_count=1,
                gin_signal_count=2 * M * WAVES,
                gin_connection_type=nccl.NcclGinConnectionType.FULL,
                gin_strong_signals_required=False,
                gin_va_signals_required=False,
            )
        )
        capability = torch.cuda.get_device_capability(device)
        self._kernel = compile_for(self._config, f"sm_{capability[0]}{capability[1]}a")
        self._epoch_MW = torch.zeros(M * WAVES, dtype=torch.int64, device=device)
        self._report = torch.zeros(2, dtype=torch.int32).pin_memory()
        self._full_M = torch.full((M,), _FULL, dtype=torch.int32, device=device)
        self._windows: list[Any] = []
        self._buffers: list[Any] = []
        self._place_bytes = 0

    def exchange(self, rows: Tensor, counts: RowCounts | None) -> Tensor:
        """Rows that other nodes sent: uint8 [B, n] -> [B, n]."""
        self._reserve(rows.nbytes)
        received = torch.empty_like(rows)
        self._launch(rows, received, counts or RowCounts(self._full_M, self._full_M))
        return received

    def _launch(self, rows: Tensor, received: Tensor, counts: RowCounts) -> None:
        import cuda.bindings.driver as cuda
        from cutlass import Int32, Int64, Uint32

        B, row_bytes = rows.shape
        self._kernel(
            self._device_comm,
            *self._windows,
            (_pointer(Uint32, rows, _WORD), _pointer(Uint32, received, _WORD)),
            (_pointer(Int32, counts.sent_M, 4), _pointer(Int32, counts.arriving_M, 4)),
            (_pointer(Int64, self._epoch_MW, 8), _pointer(Int32, self._report, 4)),
            (Int32(B // self._config.nodes), Int32(row_bytes), Int64(self._place_bytes)),
            Int32(self._limit_ms),
            cuda.CUstream(torch.cuda.current_stream().cuda_stream),
        )

    def _reserve(self, size: int) -> None:
        """Make windows whose places hold blocks of `size` bytes; collective when they grow."""
        if size <= self._place_bytes:
            return
        import nccl.core as nccl

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("windows of a rail cannot grow in a capture: run a step before it")
        torch.cuda.synchronize()
        dist.barrier(self._group)  # no rank still reads or writes the old ones
        self._close_windows()
        self._place_bytes = size
        for _ in ("send", "receive"):
            buffer = nccl.mem_alloc(2 * size)
            self._windows.append(self._comm.register_window(buffer, nccl.WindowFlag.COLL_SYMMETRIC))
            self._buffers.append(buffer)

    def _close_windows(self) -> None:
        for window in self._windows:
            window.close()
        self._windows.clear()
        self._buffers.clear()

    def begin(self) -> None:
        """Nothing: exchanges go on counting, and each waits for the one before."""

    def release(self) -> None:
        """Free the communicator and its windows, in whatever state other ranks are."""
        self._windows.clear()
        self._comm.abort()
        self._buffers.clear()

    def missing(self) -> str:
        """Error text on the rank that a wait timed out for; empty if none did."""
        node, wave = self._report.tolist()
        if not node:
            return ""
        peer = dist.get_global_rank(self._group, node - 1)
        return f"rank {peer} has not sent wave {wave} of its rows between nodes"


def _pointer(dtype: Any, tensor: Tensor, align: int) -> Any:
    """Address of a tensor as an argument of a kernel."""
    from cutlass.cute import AddressSpace
    from cutlass.cute.runtime import make_ptr

    return make_ptr(dtype, tensor.data_ptr(), AddressSpace.gmem, assumed_align=align)
