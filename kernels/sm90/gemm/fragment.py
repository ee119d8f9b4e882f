"""What a function of an epilogue sees: 8 values of a lane, and what was loaded for them.

A warp owns 16 rows of a tile. Of 16 columns a lane has 8 values, as wgmma leaves them: value i is
in the row i // 2 % 2 of the lane's two rows, 8 apart, and in the column 8 * (i // 4) + i % 2 from
the lane's first one. The four lanes that share a row differ in the two lowest bits.

Legend: S rows, L experts, N columns.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.jit import ptx


class Warp:
    """Position of a warp in a tile; `thread` counts from the first multiplying thread."""

    def __init__(self, loop: Mainloop, thread: Int32) -> None:
        self.loop = loop
        self.blocks_m = loop.group_rows // 64  # blocks of 16 rows of a warp, at a stride of 64 rows
        self.number = cute.arch.make_warp_uniform(thread // 32)
        self.first = self.number % 4 * 16 if loop.pingpong else self.number * 16
        """First row of the warp in the tile."""

    @property
    def column(self) -> Int32:
        return 2 * (ptx.lane() % 4)

    def values(self, acc: cute.Tensor, m: int, q: int) -> list[Float32]:
        """The lane's 8 accumulators in columns 16 q .. 16 q + 15."""
        first = m * (self.loop.columns // 2) + 8 * q
        return [acc[first + i] for i in range(8)]

    @cute.jit
    def per_row(self, values: cute.Tensor, top: Int32, end: Int32) -> list[Float32]:
        """values[row] for the lane's two rows, 8 apart, of the warp's 16 from `top` on."""
        picked = []
        for half in cutlass.range_constexpr(2):
            # Lanes past the expert's end read its last row again: what they compute is not stored.
            row = cutlass.min(top + ptx.lane() // 4 + half * 8, end - 1)
            picked.append(values[row])
        return picked

    @cute.jit
    def put_row_sums(
        self, sums: cute.Tensor, to: cute.Tensor, top: Int32, end: Int32, column: Int32
    ) -> None:
        """Sum of a row over the four lanes that share it; one of them stores it to `to`[column,
        row]."""
        for half in cutlass.range_constexpr(2):
            total = sums[half]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
            lane = ptx.lane()
            row = top + lane // 4 + half * 8
            if lane % 4 == 0 and row < end:
                _put(to, column, row, total)


class Fragment:
    """A lane's 8 values of 16 columns, for a function on registers."""

    def __init__(
        self,
        walk: Any,
        of_rows: dict[str, list[Float32]],
        of_expert: dict[str, Float32],
        sums: dict[str, cute.Tensor],
    ) -> None:
        self._walk, self._of_rows, self._of_expert, self._sums = walk, of_rows, of_expert, sums

    def at(
        self,
        acc: Callable[[int], list[Float32]],
        write: Callable[[str, int, list[Uint32]], None],
        first: Int32,
        q: int,
        expert: Int32,
        loaded: Callable[[], list[Any]] = list,
    ) -> "Fragment":
        """Move on to columns 16 q .. 16 q + 15 from `first` on."""
        self._acc, self._write, self._loaded = acc, write, loaded
        self._first, self._q, self._expert = first, q, expert
        return self

    def acc(self, part: int = 0) -> list[Float32]:
        """The accumulators of a part of the tile's columns."""
        return self._acc(part)

    def row(self, name: str, i: int) -> Float32:
        """A load per row, for value i."""
        return self._of_rows[name][i // 2 % 2]

    def expert(self, name: str) -> Float32:
        """A load per expert."""
        return self._of_expert[name]

    def add_columns(self, values: list[Float32], name: str, part: int = 0, scale: str = "") -> None:
        """Add a load per column of a part, times the load per row `scale`, if any."""
        words, width = self._walk.tensors[name], self._walk.width
        n = part * width + self._first + 16 * self._q + self._walk.warp.column
        for i in range(2):
            low, high = ptx.unpack(words[self._expert, (n + 8 * i) // 2])
            for half in range(2):
                first = 4 * i + 2 * half
                a, b = low, high
                if scale:
                    by = self.row(scale, first)
                    a, b = low * by, high * by
                values[first], values[first + 1] = values[first] + a, values[first + 1] + b

    def add_sum(self, name: str, i: int, value: Float32) -> None:
        """Add a term of value i to a sum of its row."""
        sums, half = self._sums[name], i // 2 % 2
        sums[half] = sums[half] + value

    def zero_sums(self) -> None:
        for sums in self._sums.values():
            sums.fill(0.0)

    def put(self, name: str, values: list[Float32], part: int = 0) -> list[Float32]:
        """Store 8 values of a part of an output; returns them as they are rounded."""
        words = pack(values)
        self._write(name, part, words)
        return unpack(words)

    def put_each(self, function: Callable[..., tuple[Float32, ...]]) -> None:
        """Store function(fragment, i, acc, *loaded) of each value i: one result for each part of
        the outputs."""
        acc, loaded, words = self.acc(), self._loaded(), list[list[Uint32]]()
        for pair in range(4):  # one pair at a time, or registers run out
            parts = [ptx.unpack(of_part[pair]) for of_part in loaded]
            results = [
                function(self, 2 * pair + k, acc[2 * pair + k], *(part[k] for part in parts))
                for k in range(2)
            ]
            words = words or [[] for _ in results[0]]
            for into, low, high in zip(words, *results, strict=True):
                into.append(ptx.pack(low, high))
        of_part = dict(zip(self._walk.parts, words, strict=True))
        for name, part in self._walk.order:
            self._write(name, part, of_part[name, part])


def pack(values: list[Float32]) -> list[Uint32]:
    """bf16 words of two neighbours."""
    return [ptx.pack(values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]


def unpack(words: list[Uint32]) -> list[Float32]:
    """Values of such words."""
    return [x for word in words for x in ptx.unpack(word)]


def _put(tensor: cute.Tensor, i: Int32, j: Int32, value: Float32) -> None:
    tensor[i, j] = value
