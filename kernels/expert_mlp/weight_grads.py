"""Gradients of the weights and biases of an expert MLP, after the data gradient.

They may be computed for the parts of a plan, from the same rows. An operand is freed after its last
use: these are the largest tensors of the backward pass.

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Backend, put
from phalanx.kernels.expert_mlp.calls import BiasGradCall, Operand, Rows, WgradCall
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer

type Buffers = Sequence[Buffer | None]  # of a layer's weight and bias; None: new tensors
type Gradients = tuple[Tensor | None, Tensor | None]


@dataclass
class WeightGrads:
    """Operands of the gradients of weights and biases."""

    ops: Backend
    plan: ExpertPlan  # plan of all experts
    needs: Sequence[bool]  # which of the gradients of w1, w2, b1 and b2 are wanted
    w1_operands: list[Operand]  # gradient of h, and x unless `tokens` brings it
    w2_operands: list[Operand]  # gradient of out, and activations; empty if not wanted
    b1_operand: Operand | None
    b2_operand: Operand | None
    db1_LH: Tensor | None = None  # gradient of b1, if a kernel had it as a by-product
    tokens: Callable[[], Rows] | None = None  # returns x, at its first use

    def all(self, buffers: Sequence[Buffer | None]) -> list[Tensor | None]:
        """Gradients of w1, w2, b1 and b2 of all experts, None where they are not wanted."""
        dw2, db2 = self.fc2_grads(self.plan, buffers[1::2])
        dw1, db1 = self.fc1_grads(self.plan, buffers[::2])
        return [dw1, dw2, db1, db2]

    def fc1_grads(self, plan: ExpertPlan, buffers: Buffers, *, last: bool = True) -> Gradients:
        """Gradients of w1 and b1 of a plan or a part; `last`: no other part follows."""
        dw = None
        if (call := self._w1_call(plan, buffers[0])) is not None:
            dw = self.ops.wgrad(call)
            del call
        db = self._b1_grad(plan, buffers[1])
        if last:
            self._free_fc1()
        return dw, db

    def fc2_grads(self, plan: ExpertPlan, buffers: Buffers, *, last: bool = True) -> Gradients:
        dw = None
        if (call := self._w2_call(plan, buffers[0])) is not None:
            dw = self.ops.wgrad(call)
            del call
        db = self._b2_grad(plan, buffers[1])
        if last:
            self._free_fc2()
        return dw, db

    def write_with(self, later: "WeightGrads", buffers: Sequence[Buffer | None]) -> None:
        """Write the sums of these gradients and those of another micro-batch, of the same experts.

        Those of weights are computed in one pass (`Backend.wgrad_pair`).
        """
        w1, w2, b1, b2 = buffers
        others = [None if b is None else b._replace(add=True) for b in (b1, b2)]
        first, second = self._w2_call(self.plan, w2), later._w2_call(later.plan, None)
        if first is not None and second is not None:
            self.ops.wgrad_pair(first, second)
        del first, second
        self._b2_grad(self.plan, b2)
        later._b2_grad(later.plan, others[1])
        self._free_fc2()
        later._free_fc2()
        first, second = self._w1_call(self.plan, w1), later._w1_call(later.plan, None)
        if first is not None and second is not None:
            self.ops.wgrad_pair(first, second)
        del first, second
        self._b1_grad(self.plan, b1)
        later._b1_grad(later.plan, others[0])
        self._free_fc1()
        later._free_fc1()

    def _w1_call(self, plan: ExpertPlan, buffer: Buffer | None) -> WgradCall | None:
        if self.tokens is not None:
            x = Operand(self.tokens(), gather=plan.row_index_S is not None)
            self.w1_operands, self.tokens = [*self.w1_operands, x], None
        if not self.needs[0]:
            return None
        self.w1_operands = dh, x = self._columns(self.w1_operands)
        return WgradCall(dh, x, plan, buffer)

    def _w2_call(self, plan: ExpertPlan, buffer: Buffer | None) -> WgradCall | None:
        if not self.needs[1]:
            return None
        self.w2_operands = dy, a = self._columns(self.w2_operands)
        return WgradCall(dy, a, plan, buffer)

    def _b1_grad(self, plan: ExpertPlan, buffer: Buffer | None) -> Tensor | None:
        if self.needs[2] and self.db1_LH is not None:
            return put(plan.select(self.db1_LH), buffer)
        if self.needs[2] and self.b1_operand is not None:
            return self.ops.bias_grad(BiasGradCall(self.b1_operand, plan, False, buffer))
        return None

    def _b2_grad(self, plan: ExpertPlan, buffer: Buffer | None) -> Tensor | None:
        if not self.needs[3] or self.b2_operand is None:
            return None
        scaled = plan.row_prob_S is not None
        return self.ops.bias_grad(BiasGradCall(self.b2_operand, plan, scaled, buffer))

    def _free_fc1(self) -> None:
        self.w1_operands, self.b1_operand = [], None

    def _free_fc2(self) -> None:
        self.w2_operands, self.b2_operand = [], None

    def _columns(self, operands: list[Operand]) -> list[Operand]:
        return [self.ops.columns(x, self.plan) for x in operands]
