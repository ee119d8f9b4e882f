"""Kernel of the rail's engine `gin`: GPUs send rows themselves, by NCCL's device API.

A CTA serves one wave of one node: it copies its part of the block into the window that others may
read, puts the rows that hold data into the window of that node, with one signal behind them, waits
for the node's own part, and copies it out. Waves are equal static parts of a block.

Windows have two places with signals of their own, used in turn. An exchange that writes a place
again comes after the whole exchange in between, whose signals came from kernels that had read it;
so no flag says that a place is free. For the same reason signals may be weak, which promise nothing
about earlier puts: those of the exchange before have the other place's signals. Exchanges are
counted on the device, each CTA for itself, so that a captured graph goes on counting. A wait that
takes too long stores the node's number for the host, and traps.

The module needs the package nccl4py, which the docstring of `parallel.dispatcher.rail.gin` is
about. Legend: M nodes, C rows of a block, W waves.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import nccl.core.device.cute as nccl
from cutlass import Int32, Int64

from phalanx.kernels.sm90.exchange import peer
from phalanx.kernels.sm90.jit import ptx

_INCREMENT = 0
"""NCCL's code for a signal that adds 1."""
_STRIDE = 4
"""16-byte accesses of a thread in flight."""


@dataclass(frozen=True)
class GinConfig:
    """Compiled-in sizes."""

    nodes: int
    """M."""
    index: int
    """Number of this rank's node."""
    waves: int = 4
    """W."""
    threads: int = 512


class GinKernel:
    """Exchange of the blocks of a rail."""

    def __init__(self, config: GinConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        comm: nccl.DevComm,
        send: nccl.Window,
        receive: nccl.Window,
        rows: tuple[cute.Pointer, cute.Pointer],
        counts: tuple[cute.Pointer, cute.Pointer],
        state: tuple[cute.Pointer, cute.Pointer],
        sizes: tuple[Int32, Int32, Int64],
        limit_ms: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the exchange.

        Args:
            comm, send, receive: NCCL's communicator of the rail and windows of two places each.
            rows: blocks to send and to fill, 16-byte words.
            counts: int32 [M], rows of each block that are sent and that arrive.
            state: int64 [M * W], exchanges that each CTA has finished; and int32 [2] that the host
                can read: 1 + the node that a wait timed out for, and the wave.
            sizes: C, bytes of a row (a multiple of 16), and bytes of a place.
            limit_ms: milliseconds after which a wait traps.
            stream: stream of the launch.
        """
        grid = [self.config.waves, self.config.nodes, 1]
        block = [self.config.threads, 1, 1]
        self.exchange(comm, send, receive, rows, counts, state, sizes, limit_ms).launch(
            grid=grid, block=block, stream=stream
        )

    @cute.kernel
    def exchange(
        self,
        comm: nccl.DevComm,
        send: nccl.Window,
        receive: nccl.Window,
        rows: tuple[cute.Pointer, cute.Pointer],
        counts: tuple[cute.Pointer, cute.Pointer],
        state: tuple[cute.Pointer, cute.Pointer],
        sizes: tuple[Int32, Int32, Int64],
        limit_ms: Int32,
    ) -> None:
        M, W, index = self.config.nodes, self.config.waves, self.config.index
        C, row_bytes, place_bytes = sizes
        thread, (wave, node, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        cta = node * W + wave
        epoch_MW = cute.make_tensor(state[0], cute.make_layout(M * W))
        sent_M = cute.make_tensor(counts[0], cute.make_layout(M))
        arriving_M = cute.make_tensor(counts[1], cute.make_layout(M))
        epoch = epoch_MW[cta]
        first = wave * cute.ceil_div(C, W)
        most = cutlass.min(cute.ceil_div(C, W), C - first)
        block = Int64(node * C + first) * Int64(row_bytes)
        source, target = rows[0].toint() + block, rows[1].toint() + block
        size = _part(sent_M[node], first, most) * Int64(row_bytes)
        if node == index:
            self.copy(target, source, size, thread)
        else:
            parity = Int32(epoch & Int64(1))
            place = Int64(parity) * place_bytes
            out = _at(send, place + block)
            self.copy(out, source, size, thread)
            gin = comm.gin(nccl.GinBackendMask.ALL, 0)
            cta_group = nccl.cta()
            there = place + Int64(index * C + first) * Int64(row_bytes)
            signals = parity * (M * W)
            # The copies of all threads come before the put of one: `put` begins with a barrier of
            # the CTA, and fences at the scope of the device.
            if size > 0:
                words = cute.make_layout(size // 8)
                gin.put(
                    comm.team_world,
                    node,
                    receive,
                    receive.tensor(Int64, words, there),
                    send,
                    send.tensor(Int64, words, place + block),
                    cta_group,
                    is_signal=True,
                    signal_id=signals + index * W + wave,
                    signal_op=_INCREMENT,
                    signal_op_arg=1,
                )
            else:
                signal = signals + index * W + wave
                gin.signal(comm.team_world, node, True, signal, _INCREMENT, 1, cta_group)
            if thread == 0:
                # A place has every other exchange.
                least = (epoch >> Int64(1)) + Int64(1)
                self.wait(gin, signals + cta, least, limit_ms, state[1].toint())
            cute.arch.sync_threads()
            arrived = _part(arriving_M[node], first, most) * Int64(row_bytes)
            self.copy(target, _at(receive, place + block), arrived, thread)
        cute.arch.sync_threads()
        if thread == 0:
            epoch_MW[cta] = epoch + 1

    @cute.jit
    def copy(self, target: Int64, source: Int64, size: Int64, thread: Int32) -> None:
        """All threads of the CTA: copy a multiple of 16 bytes."""
        step = 16 * self.config.threads
        at = Int64(16 * thread)
        while at + Int64((_STRIDE - 1) * step) < size:
            words = [peer.load_global(source + at + Int64(i * step)) for i in range(_STRIDE)]
            for i in cutlass.range_constexpr(_STRIDE):
                ptx.store_global(target + at + Int64(i * step), *words[i])
            at += Int64(_STRIDE * step)
        while at < size:
            ptx.store_global(target + at, *peer.load_global(source + at))
            at += Int64(step)

    @cute.jit
    def wait(
        self, gin: nccl.Gin, signal: Int32, least: Int64, limit_ms: Int32, report: Int64
    ) -> None:
        """Wait until a signal has reached `least`, or trap."""
        value = gin.read_signal(signal=signal)
        start_ns = cute.arch.globaltimer()
        while value < least:
            if cute.arch.globaltimer() - start_ns > Int64(limit_ms) * 1_000_000:
                # The node comes last: the host takes a report for complete once it is not 0.
                cta = signal % Int32(self.config.nodes * self.config.waves)
                peer.store_release(report + 4, cta % Int32(self.config.waves))
                peer.store_release(report, cta // Int32(self.config.waves) + 1)
                cute.arch.fence_acq_rel_sys()  # the report is in host memory before the trap
                peer.trap()
            value = gin.read_signal(signal=signal)


@cute.jit
def _part(count: Int32, first: Int32, most: Int32) -> Int64:
    """Rows of a wave that begins at row `first` and has at most `most`, of a block of `count`."""
    return Int64(cutlass.max(cutlass.min(count - first, most), 0))


@cute.jit
def _at(window: nccl.Window, offset: Int64) -> Int64:
    """Address of a byte of this rank's own memory in a window."""
    return cute.make_ptr(cutlass.Int8, window.local_pointer(offset)).toint()


def compile_for(config: GinConfig, arch: str) -> Any:
    """Compile the kernel, in some seconds, without a GPU."""
    from cutlass.cute.runtime import make_fake_stream, make_ptr
    from nccl.core.device.cute import runtime

    def pointer(dtype: Any, align: int) -> Any:
        return make_ptr(dtype, align, cute.AddressSpace.gmem, assumed_align=align)

    words = pointer(cutlass.Uint32, 16)
    return cute.compile(
        GinKernel(config),
        runtime.make_fake_dev_comm(),
        runtime.make_fake_window(),
        runtime.make_fake_window(),
        (words, words),
        (pointer(Int32, 4), pointer(Int32, 4)),
        (pointer(Int64, 8), pointer(Int32, 4)),
        (Int32(1), Int32(16), Int64(16)),
        Int32(1),
        make_fake_stream(),
        options=f"--gpu-arch {arch}",
    )
