"""Epilogues of the grouped GEMMs: from a tile's accumulators to memory.

A fusion is a frozen dataclass over `Epilogue` that declares what it loads, stores and sums, and a
function on registers; its fields are compiled in. `experts.fused_gemm` has an example. What is
declared is what `host` takes, in this order: rows that are loaded, outputs, loads, sums. The
`row_store` does the rest: which channels, when, and how they come to memory.

On the device an epilogue is one object a warp: `prefetch` runs when the tile is known, ahead of its
multiplication; a call stores the tile at `row` and column tile `column` of an expert that ends at
`end`. Between tiles a warp has one integer (`carry`), which each call takes and returns: for
`Linear` the pending tile of its `Signaller`, with loaded rows phases of their barriers. Every value
is rounded once.

Who does what. Each of the 8 multiplying warps has 16 rows of a tile (twice, if its group has a tile
to itself) and all of its columns, and works alone: the fragment of `Fragment` is its lanes' part of
16 columns. Barriers and fences are the row store's; an epilogue has none of its own. What it reads
besides, factors and biases, is constant while the kernel runs.

Legend: S rows, N columns of b, F channels of an output's part, L experts, C column tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.exchange.waves import Signaller
from phalanx.kernels.sm90.gemm import activate
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.row_store import (
    LOADED_ROWS,
    STEP,
    Places,
    RowStore,
    StripStore,
    StripWalk,
    Walk,
)
from phalanx.kernels.sm90.jit import ptx


class Load(NamedTuple):
    """Factors or terms: fp32 [S] per row, [L] per expert; bf16 [L, N / 2] in words of two."""

    name: str
    per: Literal["row", "column", "expert"]
    used: bool = True


class Out(NamedTuple):
    """Rows [S, parts * F] that `compute` puts."""

    name: str
    parts: int = 1
    kept: bool = True  # False: `put` rounds, but nothing is stored
    fp8: str = "e4m3"  # its format in FP8


class Fragment:
    """A lane's 8 values of 16 columns, for a function on registers.

    They are as wgmma leaves them: value i is in the row i // 2 % 2 of the lane's two rows, 8 apart,
    and in the column 8 * (i // 4) + i % 2 from the lane's first one. The four lanes that share a
    row differ in the two lowest bits.
    """

    def __init__(self, walk: Walk, top: Int32, end: Int32, expert: Int32, sums: Any = None) -> None:
        self._walk, self._expert, self._sums = walk, expert, sums or {}
        self._loads: dict[str, list[Float32]] = {}
        for load in walk.epilogue.loads:
            # Once for 16 rows: all columns take the same two factors of a lane.
            if load.used and load.per == "row":
                self._loads[load.name] = walk.warp.per_row(walk.tensors[load.name], top, end)
            if load.used and load.per == "expert":
                # One for both rows, so that `load` picks by row in either case.
                self._loads[load.name] = [walk.tensors[load.name][expert]] * 2
        for total in self._sums.values():
            total.fill(0.0)

    def at(self, acc: cute.Tensor, m: int, block: int, f: Int32, q: int, to: Places) -> "Fragment":
        """Move on to 16 columns, `block` of a part of the tile, of which f + 16 q is the first."""
        self._acc, self._m, self.block, self._f, self.q, self._to = acc, m, block, f, q, to
        return self

    def acc(self, part: int = 0) -> list[Float32]:
        """The accumulators of a part of the tile's columns."""
        # The tile's columns are the gate's, then the linear half's, so that this lane has both
        # values of a channel. A half has columns // 32 blocks of 16.
        block = part * (self._walk.loop.columns // 32) + self.block
        return self._walk.warp.values(self._acc, self._m, block)

    def load(self, name: str, i: int) -> Float32:
        """A load per row or per expert, for value i."""
        return self._loads[name][i // 2 % 2]

    def add_columns(self, values: list[Float32], name: str, part: int = 0, scale: str = "") -> None:
        """Add a load per column of a part, times the load per row `scale`, if any."""
        words, walk = self._walk.tensors[name], self._walk
        n = part * walk.width + self._f + 16 * self.q + walk.warp.column
        for first in (0, 2, 4, 6):
            # Values 0, 1 and 2, 3 are two rows of the same two columns: one word serves both.
            if first % 4 == 0:
                low, high = ptx.unpack(words[self._expert, (n + 2 * first) // 2])
            a, b = low, high
            if scale:
                a, b = (x * self.load(scale, first) for x in (low, high))
            values[first], values[first + 1] = values[first] + a, values[first + 1] + b

    def add_sum(self, name: str, i: int, value: Float32) -> None:
        """Add a term of value i to a sum of its row."""
        sums, half = self._sums[name], i // 2 % 2
        sums[half] = sums[half] + value

    def put(self, name: str, values: list[Float32], part: int = 0) -> list[Float32]:
        """Store 8 values of a part of an output; returns them as they are rounded."""
        words = pack(values)
        self._write((name, part), words)
        return unpack(words)

    def put_each(self, function: Callable[..., tuple[Float32, ...]]) -> None:
        """Store function(fragment, i, acc, *loaded), a result a part, of each value i."""
        walk, acc = self._walk, self.acc()
        loaded = [walk.staging.read(strip, self.q) for strip in self._to[LOADED_ROWS]]
        words = dict[Any, list[Uint32]]((part, []) for part in walk.parts)
        for pair in range(4):  # one pair at a time, or registers run out
            rows = [ptx.unpack(of_part[pair]) for of_part in loaded]
            results = [
                function(self, 2 * pair + k, acc[2 * pair + k], *(row[k] for row in rows))
                for k in range(2)
            ]
            for into, low, high in zip(words.values(), *results, strict=True):
                into.append(ptx.pack(low, high))
        # What takes the place of loaded rows is written last.
        for part in walk.order:
            self._write(part, words[part])

    def _write(self, part: tuple[str, int], words: list[Uint32]) -> None:
        to = self._to.get(part)
        # A strip, a function that keeps the words for later, or None: rounded, but not stored.
        if callable(to):
            to(self, words)
        elif to is not None:
            self._walk.staging.write(to, self.q, words)


def pack(values: list[Float32]) -> list[Uint32]:
    """bf16 words of two neighbours."""
    return [ptx.pack(values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]


def unpack(words: list[Uint32]) -> list[Float32]:
    """Values of such words."""
    return [x for word in words for x in ptx.unpack(word)]


@dataclass(frozen=True)
class Epilogue:
    """Base of all: subclasses declare and compute."""

    step: ClassVar[int] = STEP  # channels of a strip, 32 or 64
    row_store: ClassVar[type[RowStore]] = StripStore
    fragment: ClassVar[type[Fragment]] = Fragment

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
        """Channels of h for one of a: parts of the tile's columns, unless rows are loaded."""
        return 1

    @property
    def product_parts(self) -> int:
        """Channels of B for one of an output; with loaded rows it is these that have parts."""
        return 1 if self.loaded else self.num_gate_parts

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
        # Loaded rows come first, then outputs; what is left are vectors.
        first = 1 if self.loaded else 0
        behind = first + len(self.outputs)
        rows, scales = self.row_store(self, loop).host(tensors[:first], tensors[first:behind])
        return rows, tensors[behind:], scales

    def device(self, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> Walk:
        return self.row_store(self, loop).device(storage, thread, args)


@dataclass(frozen=True)
class Linear(Epilogue):
    """y = acc (+ bias * scale)."""

    bias: bool = False
    signals: bool = False  # signal finished tiles to a reader that waits for waves of experts

    step: ClassVar[int] = 64
    outputs = (Out("y"),)

    @property
    def loads(self) -> tuple[Load, ...]:
        return Load("bias", "column", self.bias), Load("scale", "row", self.bias)

    def sets(self, loop: Mainloop) -> int:
        return 4 if loop.pingpong else 2

    def compute(self, at: Fragment) -> None:
        y = at.acc()
        if self.bias:
            at.add_columns(y, "bias", scale="scale")
        at.put("y", y)

    def device(self, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> StripWalk:
        """`args`: of `host`, with arguments of a `Signaller` behind the declared tensors."""
        return _SignallingWalk(StripStore(self, loop), storage, thread, args)


class _SignallingWalk(StripWalk):
    """`carry` is the pending tile of a `Signaller`; `expert`, if it signals, the expert's slice."""

    def __init__(self, store: StripStore, storage: Any, thread: Int32, args: Any) -> None:
        super().__init__(store, storage, thread, args)
        self.signal = Signaller(*self.rest)

    def begin(self, carry: Int32, expert: Int32) -> tuple[Int32, Int32]:
        # Records then hold the expert itself: there are no slices.
        if not self.epilogue.signals:
            return carry, expert
        # Cooperative: the last tile's stores have drained under this one's product.
        if not self.loop.pingpong:
            self.signal(carry)
        return self.signal.pending(expert), expert >> self.signal.slice_bits

    def end(self, carry: Int32) -> None:
        # Ping-pong: while this group waits for its stores, the other one multiplies.
        if self.epilogue.signals and self.loop.pingpong:
            self.signal(carry)

    def finish(self, carry: Int32) -> None:
        super().finish(carry)
        # The last tile has no next one at which it would be signalled: without this the reader
        # would wait for it for ever.
        if self.epilogue.signals and not self.loop.pingpong:
            self.signal(carry)


@dataclass(frozen=True)
class Act(Epilogue):
    """h = acc + bias, rounded; a = act(h) * prob. Columns of the tile: gate, then linear half."""

    act: Activation
    bias: bool = False
    keep_h: bool = True
    prob: bool = True

    @property
    def num_gate_parts(self) -> int:
        return 2 if self.act.gated else 1

    @property
    def loads(self) -> tuple[Load, ...]:
        return Load("bias", "column", self.bias), Load("prob", "row", self.prob)

    @property
    def outputs(self) -> tuple[Out, ...]:
        return Out("h", self.num_gate_parts, self.keep_h), Out("a")

    def compute(self, at: Fragment) -> None:
        h = []
        for part in range(self.num_gate_parts):
            values = at.acc(part)
            if self.bias:
                at.add_columns(values, "bias", part)
            # a follows from h as it is rounded: the backward pass recomputes it from that, bit for
            # bit.
            h.append(at.put("h", values, part))
        # Without a gate both are h.
        gate, up = h[0], h[-1]
        a = [activate.forward(self.act, gate[i], up[i]) for i in range(8)]
        if self.prob:
            a = [x * at.load("prob", i) for i, x in enumerate(a)]
        at.put("a", a)


@dataclass(frozen=True)
class ActGrad(Epilogue):
    """acc is the gradient of a = act(h) * prob: dh, a, and partial sums of prob's gradient."""

    act: Activation
    prob: bool = True

    @property
    def num_gate_parts(self) -> int:
        return 2 if self.act.gated else 1

    @property
    def loaded(self) -> int:
        return self.num_gate_parts

    @property
    def loads(self) -> tuple[Load, ...]:
        return (Load("prob", "row", self.prob),)

    @property
    def outputs(self) -> tuple[Out, ...]:
        return Out("dh", self.loaded), Out("a")

    @property
    def sums(self) -> tuple[str, ...]:
        return ("dprob",) if self.prob else ()

    def compute(self, at: Fragment) -> None:
        at.put_each(self._gradients)

    def _gradients(self, at: Fragment, i: int, value: Float32, *h: Float32) -> tuple[Float32, ...]:
        gate, up = h[0], h[-1]
        # The activation was scaled by prob: so is its gradient, while prob's own takes `value`.
        scaled = value * at.load("prob", i) if self.prob else value
        d_gate, d_up, a = activate.backward(self.act, gate, up, scaled)
        if self.prob:
            # Of this tile's columns: tiles of a row add theirs in a fixed order later (`dprob`).
            at.add_sum("dprob", i, value * a)
            a = a * at.load("prob", i)
        return (d_gate, d_up, a) if self.act.gated else (d_gate, a)
