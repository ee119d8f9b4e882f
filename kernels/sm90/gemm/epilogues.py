"""Epilogues of the grouped GEMMs: from a tile's accumulators to memory.

Each is a frozen choice (compiled in) with a host side, which creates the TMA descriptors, and a
device side for one warp: `prefetch` runs when the tile is known, ahead of its multiplication; a
call stores the tile at `row` and column tile `column` of an expert that ends at `end`. Between
tiles a warp has one integer (`carry`), which each call takes and returns: for `Linear` the pending
tile of its `Signaller`, for `ActGrad` phases of its barriers. Every value is rounded once.

Legend: S rows, N columns of y, F expert width, H = 2F or F channels of h, L experts.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.exchange.waves import Signaller
from phalanx.kernels.sm90.gemm import activate
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import Rows
from phalanx.kernels.sm90.gemm.smem_strips import WARPS, Staging, Strips
from phalanx.kernels.sm90.gemm.tensors import array, matrix, struct
from phalanx.kernels.sm90.jit import ptx


class _Warp:
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


def _add_bias(
    values: list[Float32], words: cute.Tensor, expert: Int32, n: Int32, scales: list[Float32]
) -> None:
    for i in range(2):
        low, high = ptx.unpack(words[expert, (n + 8 * i) // 2])
        for half in range(2):
            first = 4 * i + 2 * half
            a, b = (low * scales[half], high * scales[half]) if scales else (low, high)
            values[first], values[first + 1] = values[first] + a, values[first + 1] + b


def bf16_rows(x: Rows) -> cute.Tensor:
    """Host side: rows in bf16 that an epilogue writes."""
    return matrix(cute.recast_ptr(x.data, dtype=BFloat16), x.rows, x.channels)


def _pack(values: list[Float32]) -> list[Uint32]:
    return [ptx.pack(values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]


def _unpack(words: Any) -> list[Float32]:
    return [x for word in words for x in ptx.unpack(word)]


@dataclass(frozen=True)
class Linear:
    """y = acc (+ bias * scale)."""

    bias: bool = False
    signals: bool = False  # signal finished tiles to a reader that waits for waves of experts

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

    def device(self, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> "_Linear":
        return _Linear(self, loop, storage, thread, args)


class _Linear:
    def __init__(
        self, config: Linear, loop: Mainloop, storage: Any, thread: Int32, args: Any
    ) -> None:
        self.config, self.loop, self.warp = config, loop, _Warp(loop, thread)
        self.staging = Staging(config.strips(loop), storage, thread)
        self.tma, self.mY, self.bias, self.scale, signal = args
        self.signal = Signaller(*signal)

    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        """Nothing to prepare."""

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        """If it signals, `expert` is the expert's slice."""
        if cutlass.const_expr(self.config.signals):
            # Cooperative: the last tile's stores have drained under this one's product.
            if cutlass.const_expr(not self.loop.pingpong):
                self.signal(carry)
            carry = self.signal.pending(expert)
            expert = expert >> self.signal.slice_bits
        for m in cutlass.range_constexpr(self.warp.blocks_m):
            top = row + self.warp.first + m * 64
            scales = []
            if cutlass.const_expr(self.config.bias):
                scales = self.warp.per_row(self.scale, top, end)
            for j in cutlass.range_constexpr(self.loop.columns // 64):
                n = column * self.loop.columns + 64 * j
                # Blocks of 16 rows past the expert's end, and columns past N, are not stored.
                if top < end and n < self.mY.shape[1]:
                    self._store(acc, m, j, top, end, n, expert, scales)
        if cutlass.const_expr(self.config.signals and self.loop.pingpong):
            # Ping-pong: while this group waits for its stores, the other one multiplies.
            self.signal(carry)
        return carry

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
        # Before the first block of a row all stores are drained: blocks past the end were skipped,
        # so the number of stores in flight is not known there.
        # Later: the strip's last store is `count` stores back.
        self.staging.drain(0 if j == 0 else count - 1)
        for q in range(4):
            values = self.warp.values(acc, m, 4 * j + q)
            if self.config.bias:
                first = n + 16 * q + self.warp.column
                _add_bias(values, self.bias, expert, first, scales)
            self.staging.write(strip, q, _pack(values))
        self.staging.store(strip, self.tma, self.mY, top, end, n)

    def finish(self, carry: Int32) -> None:
        self.staging.drain(0)
        if self.config.signals and not self.loop.pingpong:
            self.signal(carry)


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
    def h_strips(self) -> int:
        return self.num_gate_parts if self.keep_h else 0

    def sets(self, loop: Mainloop) -> int:
        """Number of sets of strips for h and a: with ping-pong one is stored, one written."""
        return 2 if loop.pingpong else 1

    def strips(self, loop: Mainloop) -> Strips:
        return Strips(32, self.sets(loop) * (self.h_strips + 1))

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
        a: Rows,
        bias: cute.Tensor,
        prob: cute.Tensor,
    ) -> Any:
        """h [S, H]; a [S, F]; bias [L, H / 2] in words of two; prob [S]."""
        strips, mA = self.strips(loop), bf16_rows(a)
        return strips.to_memory(mH), mH, strips.to_memory(mA), mA, bias, prob

    def device(self, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> "_Act":
        return _Act(self, loop, storage, thread, args)


class _Act:
    def __init__(self, config: Act, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> None:
        self.config, self.loop, self.warp = config, loop, _Warp(loop, thread)
        self.staging = Staging(config.strips(loop), storage, thread)
        self.tma_h, self.mH, self.tma_a, self.mA, self.bias, self.prob = args

    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        """Nothing to prepare."""

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
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
        return carry

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
        config, h_strips, sets = self.config, self.config.h_strips, self.config.sets(self.loop)
        first = j % sets * (h_strips + 1)
        # Before the first block of a row all stores are drained: blocks past the end were skipped,
        # so the number of stores in flight is not known there.
        self.staging.drain(0 if j == 0 else (sets - 1) * (h_strips + 1))
        for q in range(2):
            h = []
            for half in range(config.num_gate_parts):
                columns = half * (self.loop.columns // 32) + 2 * j + q
                values = self.warp.values(acc, m, columns)
                if config.bias:
                    n = half * self.mA.shape[1] + f + 16 * q + self.warp.column
                    _add_bias(values, self.bias, expert, n, [])
                # a follows from h as it is rounded: the backward pass recomputes it from that, bit
                # for bit.
                words = _pack(values)
                if config.keep_h:
                    self.staging.write(first + half, q, words)
                h.append(_unpack(words))
            gate, up = h[0], h[-1]
            a = [activate.forward(config.act, gate[i], up[i]) for i in range(8)]
            if config.prob:
                a = [x * probs[i // 2 % 2] for i, x in enumerate(a)]
            self.staging.write(first + h_strips, q, _pack(a))
        for half in range(h_strips):
            n = f + half * self.mA.shape[1]
            self.staging.store(first + half, self.tma_h, self.mH, top, end, n)
        self.staging.store(first + h_strips, self.tma_a, self.mA, top, end, f)

    def finish(self, carry: Int32) -> None:
        self.staging.drain(0)


@dataclass(frozen=True)
class ActGrad:
    """acc is the gradient of a / prob: dh, a, and partial sums of prob's gradient."""

    act: Activation
    prob: bool = True

    @property
    def num_gate_parts(self) -> int:
        return 2 if self.act.gated else 1

    def strips(self, loop: Mainloop) -> Strips:
        """Three for each part of h (and dh), then two for a."""
        # Of h one is loaded, one waits, and one is stored as dh; of a one is stored, one written.
        return Strips(32, 3 * self.num_gate_parts + 2)

    def bytes(self, loop: Mainloop) -> int:
        return self.strips(loop).bytes

    def storage(self, loop: Mainloop) -> Any:
        loaded = array(cutlass.Int64, WARPS * 3)
        return struct(strips=self.strips(loop).storage(), loaded=loaded)

    def init_barriers(self, storage: Any) -> None:
        with cute.arch.elect_one():
            for number in range(WARPS * 3):
                cute.arch.mbarrier_init(storage.loaded.data_ptr() + number, 1)

    def host(
        self,
        loop: Mainloop,
        mH: cute.Tensor,
        dh: Rows,
        a: Rows,
        prob: cute.Tensor,
        dprob: cute.Tensor,
    ) -> Any:
        """h and dh [S, H]; a [S, F]; prob [S]; dprob [column tiles, S]."""
        strips, mD, mA = self.strips(loop), bf16_rows(dh), bf16_rows(a)
        tma_d, tma_a = strips.to_memory(mD), strips.to_memory(mA)
        return strips.from_memory(mH), tma_d, mD, tma_a, mA, prob, dprob

    def device(self, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> "_ActGrad":
        return _ActGrad(self, loop, storage, thread, args)


class _ActGrad:
    """Device side of `ActGrad`: 32 channels at a time, with h of the next ones in flight. `carry`
    has a bit for each strip of h: the phase in which its barrier completes next."""

    def __init__(
        self, config: ActGrad, loop: Mainloop, storage: Any, thread: Int32, args: Any
    ) -> None:
        self.config, self.loop, self.warp = config, loop, _Warp(loop, thread)
        self.staging = Staging(config.strips(loop), storage.strips, thread)
        self.tma_h, self.tma_d, self.mD, self.tma_a, self.mA, self.prob, self.dprob = args
        self.loaded = storage.loaded.data_ptr() + self.warp.number * 3
        self.width = loop.columns // 32
        self.steps = self.width * self.warp.blocks_m

    @cute.jit
    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        self.staging.drain(0)
        self._load(0, row, column)
        self._load(1, row, column)

    def _load(self, i: int, row: Int32, column: Int32) -> None:
        """Load h for step i into its strip, whose last store has drained."""
        if i < self.steps:
            top = row + self.warp.first + i // self.width * 64
            f = column * self.loop.columns + 32 * (i % self.width)
            parts, barrier = self.config.num_gate_parts, self.loaded + i % 3
            self.staging.expect(parts, barrier)
            for half in range(parts):
                # Both parts of h complete one barrier, the gate's and the linear half's.
                n = f + half * self.mA.shape[1]
                self.staging.load(i % 3 * parts + half, self.tma_h, top, n, barrier)

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        probs = []
        sums = cute.make_rmem_tensor(2, Float32)
        for i in cutlass.range_constexpr(self.steps):
            strip = i % 3
            top = row + self.warp.first + i // self.width * 64
            if cutlass.const_expr(self.config.prob and i % self.width == 0):
                probs = self.warp.per_row(self.prob, top, end)
                sums.fill(0.0)
            f = column * self.loop.columns + 32 * (i % self.width)
            # Each of the 3 barriers completes steps / 3 phases a tile: if that is even, the phase
            # is the same in every tile and needs no register.
            if cutlass.const_expr(self.steps % 6 == 0):
                cute.arch.mbarrier_wait(self.loaded + strip, i // 3 % 2)
            else:
                cute.arch.mbarrier_wait(self.loaded + strip, (carry >> strip) & 1)
                carry = carry ^ (1 << strip)
            # All but the last store (a of step i - 1) have drained: the strips of dh of step i - 1,
            # which i + 2 loads to, and those of a of step i - 2, which this step writes.
            self.staging.drain(min(i, 1))
            self._load(i + 2, row, column)
            if top < end and f < self.mA.shape[1]:
                self._store(acc, i, top, end, f, probs, sums)
            if cutlass.const_expr(self.config.prob and i % self.width == self.width - 1):
                self._sum(sums, top, end, column)
        return carry

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
        """Words of dh (gate, up) and of a from 8 accumulators, and 8 channels of each part of h."""
        config, parts = self.config, self.config.num_gate_parts
        words: list[list[Uint32]] = [[] for _ in range(parts + 1)]
        for pair in range(4):  # one pair at a time, or registers run out
            gates, ups = ptx.unpack(h[0][pair]), ptx.unpack(h[-1][pair])
            results = []
            for gate, up, value in zip(gates, ups, d[2 * pair : 2 * pair + 2], strict=True):
                scaled = value * probs[pair % 2] if config.prob else value
                d_gate, d_up, a = activate.backward(config.act, gate, up, scaled)
                if config.prob:
                    sums[pair % 2] = sums[pair % 2] + value * a
                    a = a * probs[pair % 2]
                results.append((d_gate, d_up, a) if parts == 2 else (d_gate, a))
            for into, low, high in zip(words, *results, strict=True):
                into.append(ptx.pack(low, high))
        return words

    @cute.jit
    def _sum(self, sums: cute.Tensor, top: Int32, end: Int32, column: Int32) -> None:
        """Sum of a row over the four lanes that share it; one of them stores it."""
        for half in cutlass.range_constexpr(2):
            total = sums[half]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
            lane = ptx.lane()
            row = top + lane // 4 + half * 8
            if lane % 4 == 0 and row < end:
                _put(self.dprob, column, row, total)

    def finish(self, carry: Int32) -> None:
        self.staging.drain(0)


def _put(tensor: cute.Tensor, i: Int32, j: Int32, value: Float32) -> None:
    tensor[i, j] = value
