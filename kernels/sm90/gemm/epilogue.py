"""Epilogues of the grouped GEMMs: from a tile's accumulators to memory.

A new fusion is a frozen dataclass over `Epilogue` that declares what it loads, stores and sums, and
a function on registers. Its fields are compiled in. For example, a = scale[e] * relu(h)^2, which
also keeps h:

    @dataclass(frozen=True)
    class ScaledSquaredRelu(Epilogue):
        loads = (Load("scale", "expert"),)
        outputs = (Out("h"), Out("a"))

        def compute(self, at: Fragment) -> None:
            h = at.put("h", at.acc())
            relu = [cute.arch.fmax(x, Float32(0), nan=True) for x in h]
            at.put("a", [at.expert("scale") * x * x for x in relu])

What is declared is what `host` takes, in this order: rows that are loaded, outputs, loads, sums. A
`RowStore` (`row_store`) does the rest: which channels, when, and how they come to memory.

On the device an epilogue is one object a warp: `prefetch` runs when the tile is known, ahead of its
multiplication; a call stores the tile at `row` and column tile `column` of an expert that ends at
`end`. Between tiles a warp has one integer (`carry`), which each call takes and returns. Every
value is rounded once.

Legend: S rows, N columns of an output, L experts, C column tiles.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from cutlass import Int32

from phalanx.kernels.sm90.gemm.fragment import Fragment
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.row_store import STEP, RowStore, StripStore, Walk


class Load(NamedTuple):
    """Factors or terms that `compute` has beside the accumulators."""

    name: str
    per: Literal["row", "column", "expert"]
    """fp32 [S]; bf16 [L, N / 2] in words of two; fp32 [L]."""
    used: bool = True


class Out(NamedTuple):
    """Rows [S, parts * F] that `compute` puts."""

    name: str
    parts: int = 1
    kept: bool = True
    """False: `put` rounds, but nothing is stored."""
    fp8: str = "e4m3"
    """Its format in FP8."""


@dataclass(frozen=True)
class Epilogue:
    """What a tile becomes; subclasses declare and compute."""

    step: ClassVar[int] = STEP
    """Channels that are written to shared memory at a time: 32 or 64."""
    row_store: ClassVar[type[RowStore]] = StripStore

    @property
    def loads(self) -> tuple[Load, ...]:
        return ()

    @property
    def outputs(self) -> tuple[Out, ...]:
        """With `loaded` the first one has as many parts, and the last one has one."""
        raise NotImplementedError

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of sums over the columns of a tile: fp32 [C, S], one a row and column tile."""
        return ()

    @property
    def loaded(self) -> int:
        """Parts of the rows that are loaded under the product, bf16 [S, parts * F]; 0: none are."""
        return 0

    @property
    def num_gate_parts(self) -> int:
        """Channels of h for one of a, 2 with a gate: parts of the tile's columns, unless rows are
        loaded."""
        return 1

    def compute(self, at: Fragment) -> None:
        """The function on registers: 8 values of a lane."""
        raise NotImplementedError

    def sets(self, loop: Mainloop) -> int:
        """Number of sets of strips: with ping-pong one is stored, one written."""
        return 2 if loop.pingpong else 1

    def bytes(self, loop: Mainloop) -> int:
        """Shared memory, without barriers."""
        return self.row_store(self, loop).bytes

    def storage(self, loop: Mainloop) -> Any:
        return self.row_store(self, loop).storage()

    def init_barriers(self, storage: Any) -> None:
        """Once a CTA, by one warp; the kernel has a fence and a barrier after it."""
        self.row_store(self, None).init_barriers(storage)

    def host(self, loop: Mainloop, *tensors: Any) -> Any:
        """Arguments of `device` from tensors, in the order that is declared."""
        first = 1 if self.loaded else 0
        behind = first + len(self.outputs)
        rows, scales = self.row_store(self, loop).host(tensors[:first], tensors[first:behind])
        return rows, tensors[behind:], scales

    def device(self, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> Walk:
        return self.row_store(self, loop).device(storage, thread, args)
