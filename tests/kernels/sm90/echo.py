"""Kernels as small as possible, whose launches show what was passed to them."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, IntPtr


@dataclass(frozen=True)
class EchoConfig:
    threads: int = 32


class EchoKernel:
    """a[0] = first + second, in `blocks` blocks."""

    def __init__(self, config: EchoConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        a: IntPtr,
        b: Bf16Ptr,
        blocks: Int32,
        first: Int32,
        second: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(a, b, first, second).launch(
            grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, a: cute.Pointer, b: cute.Pointer, first: Int32, second: Int32) -> None:
        if cute.arch.thread_idx()[0] == 0:
            cute.make_tensor(a, cute.make_layout(1))[0] = first + second + Int32(b.toint())


class Buffer(NamedTuple):
    """A record of arguments."""

    first: Int32
    a: IntPtr
    second: Int32


class RecordKernel(EchoKernel):
    """`EchoKernel` whose arguments are one of records."""

    @cute.jit
    def __call__(
        self, blocks: Int32, buffer: Buffer, b: Bf16Ptr, other: Buffer, stream: cuda.CUstream
    ) -> None:
        self.kernel(buffer.a, b, buffer.first + other.first, buffer.second + other.second).launch(
            grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream
        )
