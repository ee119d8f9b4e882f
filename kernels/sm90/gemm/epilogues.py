"""Epilogues of the grouped GEMMs: what `grouped_gemm`, `fc1_act` and `fc2_dgrad_dact` compute.

How one is declared is in `epilogue`, how its rows come to memory in `row_store`; `fp8.act` has
those whose rows are quantised. Between tiles a warp has one integer (`carry`): for `Linear` the
pending tile of its `Signaller`, for `ActGrad` phases of its barriers.

Legend: h has 2F channels with a gate, F without; F expert width.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Float32, Int32

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.exchange.waves import Signaller
from phalanx.kernels.sm90.gemm import activate
from phalanx.kernels.sm90.gemm.epilogue import Epilogue, Load, Out
from phalanx.kernels.sm90.gemm.fragment import Fragment
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.row_store import StripStore, StripWalk


@dataclass(frozen=True)
class Linear(Epilogue):
    """y = acc (+ bias * scale)."""

    bias: bool = False
    signals: bool = False  # signal finished tiles to a reader that waits for waves of experts

    step: ClassVar[int] = 64

    @property
    def loads(self) -> tuple[Load, ...]:
        return Load("bias", "column", self.bias), Load("scale", "row", self.bias)

    @property
    def outputs(self) -> tuple[Out, ...]:
        return (Out("y"),)

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
        gate, up = h[0], h[-1]
        a = [activate.forward(self.act, gate[i], up[i]) for i in range(8)]
        if self.prob:
            a = [x * at.row("prob", i) for i, x in enumerate(a)]
        at.put("a", a)


@dataclass(frozen=True)
class ActGrad(Epilogue):
    """acc is the gradient of a / prob: dh, a, and partial sums of prob's gradient."""

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
        scaled = value * at.row("prob", i) if self.prob else value
        d_gate, d_up, a = activate.backward(self.act, gate, up, scaled)
        if self.prob:
            at.add_sum("dprob", i, value * a)
            a = a * at.row("prob", i)
        return (d_gate, d_up, a) if self.act.gated else (d_gate, a)
