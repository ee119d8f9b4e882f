"""What becomes of a tile's accumulators: three epilogues of the grouped GEMMs.

Each is a frozen choice (what is compiled in) with a host side, which makes the TMA descriptors, and
a device side for one warp: `before` runs when the tile is known, ahead of its multiplication; a
call stores the tile. Between tiles a warp keeps one integer for its epilogue (`kept`), which each
call takes and returns: of `Linear` that of its `Signaller`, of `ActGrad` phases of barriers. Every
value is rounded once.

Legend: S rows, N columns of y, F expert width, H = 2F or F channels of h, L experts.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.exchange.tile_progress import Signaller
from phalanx.kernels.sm90.gemm import activate
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.smem_strips import WARPS, Staging, Strips
from phalanx.kernels.sm90.gemm.storage import array, struct
from phalanx.kernels.sm90.jit import ptx


class _Warp:
    """Where a warp is in a tile."""

    def __init__(self, loop: Mainloop, thread: Int32) -> None:
        """`thread` counts from the first multiplying thread."""
        self.loop = loop
        self.blocks_m = loop.group_rows // 64
        """Blocks of 16 rows that a warp has, at a stride of 64 rows."""
        self.number = cute.arch.make_warp_uniform(thread // 32)
        self.first = self.number % 4 * 16 if loop.pingpong else self.number * 16
        """Row in the tile."""

    @property
    def column(self) -> Int32:
        """In 8 columns, of the lane's accumulators."""
        return 2 * (ptx.lane() % 4)

    def values(self, acc: cute.Tensor, m: int, q: int) -> list[Float32]:
        """The lane's 8 accumulators in columns 16 q .. 16 q + 15."""
        at = m * (self.loop.columns // 2) + 8 * q
        return [acc[at + i] for i in range(8)]

    @cute.jit
    def per_row(self, values: cute.Tensor, top: Int32, end: Int32) -> list[Float32]:
        """values[row] for the lane's two rows, 8 apart, of the warp's 16 from `top` on."""
        found = []
        for half in cutlass.range_constexpr(2):
            at = cutlass.min(top + ptx.lane() // 4 + half * 8, end - 1)
            found.append(values[at])
        return found


def _add_bias(
    values: list[Float32], words: cute.Tensor, expert: Int32, n: Int32, scales: list[Float32]
) -> None:
    """Add bias (times scale) to 8 accumulators; n is the column of the first."""
    for i in range(2):
        low, high = ptx.unpack(words[expert, (n + 8 * i) // 2])
        for half in range(2):
            at = 4 * i + 2 * half
            a, b = (low * scales[half], high * scales[half]) if scales else (low, high)
            values[at], values[at + 1] = values[at] + a, values[at + 1] + b


def _pack(values: list[Float32]) -> list[Uint32]:
    return [ptx.pack(values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]


def _unpack(words: Any) -> list[Float32]:
    return [x for word in words for x in ptx.unpack(word)]


@dataclass(frozen=True)
class Linear:
    """y = acc (+ bias * scale)."""

    bias: bool = False
    signals: bool = False
    """Signal finished tiles to a reader that waits for waves of experts (`progress`)."""

    def strips(self, loop: Mainloop) -> Strips:
        return Strips(64, 4 if loop.pingpong else 2)

    def bytes(self, loop: Mainloop) -> int:
        return self.strips(loop).bytes

    def storage(self, loop: Mainloop) -> Any:
        return self.strips(loop).storage()

    def init_barriers(self, storage: Any) -> None:
        """Nothing to initialise."""

    def host(
        self, loop: Mainloop, mY: cute.Tensor, bias: cute.Tensor, scale: cute.Tensor, *signal: Any
    ) -> Any:
        """y [S, N]; bias [L, N / 2] in words of two; scale [S]; arguments of a `Signaller`."""
        return self.strips(loop).to_memory(mY), mY, bias, scale, signal

    def device(self, loop: Mainloop, storage: Any, thread: Int32, given: Any) -> "_Linear":
        return _Linear(self, loop, storage, thread, given)


class _Linear:
    def __init__(
        self, config: Linear, loop: Mainloop, storage: Any, thread: Int32, given: Any
    ) -> None:
        self.config, self.loop, self.warp = config, loop, _Warp(loop, thread)
        self.staging = Staging(config.strips(loop), storage, thread)
        self.tma, self.mY, self.bias, self.scale, signal = given
        self.signal = Signaller(*signal)

    def before(self, row: Int32, end: Int32, column: Int32) -> None:
        """Nothing to prepare."""

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, kept: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        """Store the tile at `row` and column tile `column` of an expert that ends at `end`.

        One that signals is given the expert's slice in place of the expert.
        """
        if cutlass.const_expr(self.config.signals):
            if cutlass.const_expr(not self.loop.pingpong):
                self.signal(kept)
            kept = self.signal.pending(expert)
            expert = expert >> self.signal.slice_bits
        for m in cutlass.range_constexpr(self.warp.blocks_m):
            top = row + self.warp.first + m * 64
            scales = []
            if cutlass.const_expr(self.config.bias):
                scales = self.warp.per_row(self.scale, top, end)
            for j in cutlass.range_constexpr(self.loop.columns // 64):
                n = column * self.loop.columns + 64 * j
                if top < end and n < self.mY.shape[1]:
                    self._store(acc, m, j, top, end, n, expert, scales)
        if cutlass.const_expr(self.config.signals and self.loop.pingpong):
            self.signal(kept)
        return kept

    def _store(
        self,
        acc: cute.Tensor,
        m: int,
        j: int,
        top: Int32,
        end: Int32,
        n: Int32,
        expert: Int32,
        scales: list[Float32],
    ) -> None:
        count = self.staging.strips.count
        strip = j % count
        # Blocks may have been left out before the first of a row of them: nothing is counted.
        self.staging.drain(0 if j == 0 else count - 1)
        for q in range(4):
            values = self.warp.values(acc, m, 4 * j + q)
            if self.config.bias:
                first = n + 16 * q + self.warp.column
                _add_bias(values, self.bias, expert, first, scales)
            self.staging.write(strip, q, _pack(values))
        self.staging.store(strip, self.tma, self.mY, top, end, n)

    def finish(self, kept: Int32) -> None:
        self.staging.drain(0)
        if self.config.signals and not self.loop.pingpong:
            self.signal(kept)


@dataclass(frozen=True)
class Act:
    """h = acc + bias, rounded; a = act(h) * prob. Columns of the tile: gate, then linear half."""

    act: Activation
    bias: bool = False
    keep_h: bool = True
    prob: bool = True

    @property
    def num_gate_parts(self) -> int:
        return 2 if self.act.gated else 1

    @property
    def kept(self) -> int:
        """Strips of h that are stored."""
        return self.num_gate_parts if self.keep_h else 0

    def sets(self, loop: Mainloop) -> int:
        """How many times there are strips for h and a."""
        return 2 if loop.pingpong else 1

    def strips(self, loop: Mainloop) -> Strips:
        return Strips(32, self.sets(loop) * (self.kept + 1))

    def bytes(self, loop: Mainloop) -> int:
        return self.strips(loop).bytes

    def storage(self, loop: Mainloop) -> Any:
        return self.strips(loop).storage()

    def init_barriers(self, storage: Any) -> None:
        """Nothing to initialise."""

    def host(
        self,
        loop: Mainloop,
        mH: cute.Tensor,
        mA: cute.Tensor,
        bias: cute.Tensor,
        prob: cute.Tensor,
    ) -> Any:
        """h [S, H]; a [S, F]; bias [L, H / 2] in words of two; prob [S]."""
        strips = self.strips(loop)
        return strips.to_memory(mH), mH, strips.to_memory(mA), mA, bias, prob

    def device(self, loop: Mainloop, storage: Any, thread: Int32, given: Any) -> "_Act":
        return _Act(self, loop, storage, thread, given)


class _Act:
    """Takes 32 channels at a time."""

    def __init__(
        self, config: Act, loop: Mainloop, storage: Any, thread: Int32, given: Any
    ) -> None:
        self.config, self.loop, self.warp = config, loop, _Warp(loop, thread)
        self.staging = Staging(config.strips(loop), storage, thread)
        self.tma_h, self.mH, self.tma_a, self.mA, self.bias, self.prob = given

    def before(self, row: Int32, end: Int32, column: Int32) -> None:
        """Nothing to prepare."""

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, kept: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        """Store the tile at `row` and column tile `column` of an expert that ends at `end`."""
        wide = self.loop.columns // self.config.num_gate_parts
        for m in cutlass.range_constexpr(self.warp.blocks_m):
            top = row + self.warp.first + m * 64
            probs = []
            if cutlass.const_expr(self.config.prob):
                probs = self.warp.per_row(self.prob, top, end)
            for j in cutlass.range_constexpr(wide // 32):
                f = column * wide + 32 * j
                if top < end and f < self.mA.shape[1]:
                    self._store(acc, m, j, top, end, f, expert, probs)
        return kept

    def _store(
        self,
        acc: cute.Tensor,
        m: int,
        j: int,
        top: Int32,
        end: Int32,
        f: Int32,
        expert: Int32,
        probs: list[Float32],
    ) -> None:
        """Registers to h and a."""
        config, kept, sets = self.config, self.config.kept, self.config.sets(self.loop)
        first = j % sets * (kept + 1)
        # Blocks may have been left out before the first of a row of them: nothing is counted.
        self.staging.drain(0 if j == 0 else (sets - 1) * (kept + 1))
        for q in range(2):
            h = []
            for half in range(config.num_gate_parts):
                columns = half * (self.loop.columns // 32) + 2 * j + q
                values = self.warp.values(acc, m, columns)
                if config.bias:
                    n = half * self.mA.shape[1] + f + 16 * q + self.warp.column
                    _add_bias(values, self.bias, expert, n, [])
                words = _pack(values)
                if config.keep_h:
                    self.staging.write(first + half, q, words)
                h.append(_unpack(words))
            gate, up = h[0], h[-1]
            a = [activate.forward(config.act, gate[i], up[i]) for i in range(8)]
            if config.prob:
                a = [x * probs[i // 2 % 2] for i, x in enumerate(a)]
            self.staging.write(first + kept, q, _pack(a))
        for half in range(kept):
            n = f + half * self.mA.shape[1]
            self.staging.store(first + half, self.tma_h, self.mH, top, end, n)
        self.staging.store(first + kept, self.tma_a, self.mA, top, end, f)

    def finish(self, kept: Int32) -> None:
        self.staging.drain(0)


@dataclass(frozen=True)
class ActGrad:
    """acc is the gradient of a / prob: dh and a from h, and the gradient of prob by column tile."""

    act: Activation
    prob: bool = True

    @property
    def num_gate_parts(self) -> int:
        return 2 if self.act.gated else 1

    def strips(self, loop: Mainloop) -> Strips:
        """Three times for h and dh, then two for a."""
        return Strips(32, 3 * self.num_gate_parts + 2)

    def bytes(self, loop: Mainloop) -> int:
        return self.strips(loop).bytes

    def storage(self, loop: Mainloop) -> Any:
        loaded = array(cutlass.Int64, WARPS * 3)
        return struct(strips=self.strips(loop).storage(), loaded=loaded)

    def init_barriers(self, storage: Any) -> None:
        """One warp: initialise the barriers of the loads of h."""
        with cute.arch.elect_one():
            for number in range(WARPS * 3):
                cute.arch.mbarrier_init(storage.loaded.data_ptr() + number, 1)

    def host(
        self,
        loop: Mainloop,
        mH: cute.Tensor,
        mD: cute.Tensor,
        mA: cute.Tensor,
        prob: cute.Tensor,
        dprob: cute.Tensor,
    ) -> Any:
        """h and dh [S, H]; a [S, F]; prob [S]; dprob [column tiles, S]."""
        strips = self.strips(loop)
        dh, a = strips.to_memory(mD), strips.to_memory(mA)
        return strips.from_memory(mH), dh, mD, a, mA, prob, dprob

    def device(self, loop: Mainloop, storage: Any, thread: Int32, given: Any) -> "_ActGrad":
        return _ActGrad(self, loop, storage, thread, given)


class _ActGrad:
    """Takes 32 channels at a time; h of the next ones is on its way meanwhile.

    `kept` has a bit for each strip of h: the phase in which its barrier completes next.
    """

    def __init__(
        self, config: ActGrad, loop: Mainloop, storage: Any, thread: Int32, given: Any
    ) -> None:
        self.config, self.loop, self.warp = config, loop, _Warp(loop, thread)
        self.staging = Staging(config.strips(loop), storage.strips, thread)
        self.tma_h, self.tma_d, self.mD, self.tma_a, self.mA, self.prob, self.dprob = given
        self.loaded = storage.loaded.data_ptr() + self.warp.number * 3
        self.width = loop.columns // 32
        self.steps = self.width * self.warp.blocks_m

    @cute.jit
    def before(self, row: Int32, end: Int32, column: Int32) -> None:
        """Begin to load h of the first channels, which the multiplication hides."""
        self.staging.drain(0)
        self._load(0, row, column)
        self._load(1, row, column)

    def _load(self, i: int, row: Int32, column: Int32) -> None:
        """h for step i, whose strip has been stored."""
        if i < self.steps:
            top = row + self.warp.first + i // self.width * 64
            f = column * self.loop.columns + 32 * (i % self.width)
            parts, barrier = self.config.num_gate_parts, self.loaded + i % 3
            self.staging.expect(parts, barrier)
            for half in range(parts):
                n = f + half * self.mA.shape[1]
                self.staging.load(i % 3 * parts + half, self.tma_h, top, n, barrier)

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, kept: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        """Store the tile at `row` and column tile `column` of an expert that ends at `end`."""
        probs = []
        sums = cute.make_rmem_tensor(2, Float32)
        for i in cutlass.range_constexpr(self.steps):
            strip = i % 3
            top = row + self.warp.first + i // self.width * 64
            if cutlass.const_expr(self.config.prob and i % self.width == 0):
                probs = self.warp.per_row(self.prob, top, end)
                sums.fill(0.0)
            f = column * self.loop.columns + 32 * (i % self.width)
            if cutlass.const_expr(self.steps % 6 == 0):  # as often odd as even in every tile
                cute.arch.mbarrier_wait(self.loaded + strip, i // 3 % 2)
            else:
                cute.arch.mbarrier_wait(self.loaded + strip, (kept >> strip) & 1)
                kept = kept ^ (1 << strip)
            # Free are step i - 1's strips of dh, to which i + 2 loads, and i - 2's of a.
            self.staging.drain(min(i, 1))
            self._load(i + 2, row, column)
            if top < end and f < self.mA.shape[1]:
                self._store(acc, i, top, end, f, probs, sums)
            if cutlass.const_expr(self.config.prob and i % self.width == self.width - 1):
                self._sum(sums, top, end, column)
        return kept

    def _store(
        self,
        acc: cute.Tensor,
        i: int,
        top: Int32,
        end: Int32,
        f: Int32,
        probs: list[Float32],
        sums: cute.Tensor,
    ) -> None:
        """h in its strip becomes dh."""
        parts, strip = self.config.num_gate_parts, i % 3
        m, j = i // self.width, i % self.width
        for q in range(2):
            d = self.warp.values(acc, m, 2 * j + q)
            h = [self.staging.read(strip * parts + half, q) for half in range(parts)]
            words = self._words(d, h, probs, sums)
            self.staging.write(3 * parts + i % 2, q, words[-1])
            for half in range(parts):
                self.staging.write(strip * parts + half, q, words[half])
        for half in range(parts):
            n = f + half * self.mA.shape[1]
            self.staging.store(strip * parts + half, self.tma_d, self.mD, top, end, n)
        self.staging.store(3 * parts + i % 2, self.tma_a, self.mA, top, end, f)

    def _words(
        self, d: list[Float32], h: list[Any], probs: list[Float32], sums: cute.Tensor
    ) -> list[list[Uint32]]:
        """dh, half by half, and a of 8 accumulators and as many of each half of h."""
        config, parts = self.config, self.config.num_gate_parts
        words: list[list[Uint32]] = [[] for _ in range(parts + 1)]
        for pair in range(4):  # one by one, for want of registers
            gates, ups = ptx.unpack(h[0][pair]), ptx.unpack(h[-1][pair])
            made = []
            for gate, up, value in zip(gates, ups, d[2 * pair : 2 * pair + 2], strict=True):
                scaled = value * probs[pair % 2] if config.prob else value
                d_gate, d_up, a = activate.backward(config.act, gate, up, scaled)
                if config.prob:
                    sums[pair % 2] = sums[pair % 2] + value * a
                    a = a * probs[pair % 2]
                made.append((d_gate, d_up, a) if parts == 2 else (d_gate, a))
            for into, low, high in zip(words, *made, strict=True):
                into.append(ptx.pack(low, high))
        return words

    @cute.jit
    def _sum(self, sums: cute.Tensor, top: Int32, end: Int32, column: Int32) -> None:
        """Add up a row over the four lanes that share it; one of them stores it."""
        for half in cutlass.range_constexpr(2):
            total = sums[half]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
            lane = ptx.lane()
            at = top + lane // 4 + half * 8
            if lane % 4 == 0 and at < end:
                _put(self.dprob, column, at, total)

    def finish(self, kept: Int32) -> None:
        self.staging.drain(0)


def _put(tensor: cute.Tensor, i: Int32, j: Int32, value: Float32) -> None:
    tensor[i, j] = value
