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

type Buffers = Sequence[Buffer | None]
"""For the gradients of a layer's weight and bias."""
type Gradients = tuple[Tensor | None, Tensor | None]


@dataclass
class WeightGrads:
    """Operands of the gradients of weights and biases."""

    ops: Backend
    plan: ExpertPlan
    """Plan of all experts."""
    needs: Sequence[bool]
    """Which of the gradients of w1, w2, b1 and b2 are wanted."""
    w1_operands: list[Operand]
    """Gradient of h, and x unless `tokens` brings it; empty if not wanted."""
    w2_operands: list[Operand]
    """Gradient of out, and activations; empty if not wanted."""
    b1_operand: Operand | None
    b2_operand: Operand | None
    db1_LH: Tensor | None = None
    """Gradient of b1, if a kernel had it as a by-product."""
    tokens: Callable[[], Rows] | None = None
    """Returns x, at its first use."""

    def all(self, buffers: Sequence[Buffer | None]) -> list[Tensor | None]:
        """Gradients of w1, w2, b1 and b2 of all experts, None where they are not wanted.

        Args:
            buffers: destinations; None: new tensors.
        """
        dw2, db2 = self.fc2_grads(self.plan, buffers[1::2])
        dw1, db1 = self.fc1_grads(self.plan, buffers[::2])
        return [dw1, dw2, db1, db2]

    def fc1_grads(self, plan: ExpertPlan, buffers: Buffers, *, last: bool = True) -> Gradients:
        """Gradients of w1 and b1, None where they are not wanted.

        Args:
            plan: the plan, or a part of it.
            buffers: destinations; None: new tensors.
            last: no other part follows.
        """
        need_w, _, need_b, _ = self.needs
        dw = db = None
        if self.tokens is not None:
            x = Operand(self.tokens(), gather=plan.row_index_S is not None)
            self.w1_operands, self.tokens = [*self.w1_operands, x], None
        if need_w:
            self.w1_operands = self._columns(self.w1_operands)
            dh, x = self.w1_operands
            dw = self.ops.wgrad(WgradCall(dh, x, plan, buffers[0]))
            del dh, x
        if need_b and self.db1_LH is not None:
            db = put(plan.select(self.db1_LH), buffers[1])
        elif need_b and self.b1_operand is not None:
            db = self.ops.bias_grad(BiasGradCall(self.b1_operand, plan, False, buffers[1]))
        if last:
            self.w1_operands, self.b1_operand = [], None
        return dw, db

    def fc2_grads(self, plan: ExpertPlan, buffers: Buffers, *, last: bool = True) -> Gradients:
        """Gradients of w2 and b2, as `fc1_grads`."""
        _, need_w, _, need_b = self.needs
        dw = db = None
        if need_w:
            self.w2_operands = self._columns(self.w2_operands)
            dy, a = self.w2_operands
            dw = self.ops.wgrad(WgradCall(dy, a, plan, buffers[0]))
            del dy, a
        if need_b and self.b2_operand is not None:
            scaled = plan.row_prob_S is not None
            db = self.ops.bias_grad(BiasGradCall(self.b2_operand, plan, scaled, buffers[1]))
        if last:
            self.w2_operands, self.b2_operand = [], None
        return dw, db

    def _columns(self, operands: list[Operand]) -> list[Operand]:
        return [self.ops.columns(x, self.plan) for x in operands]
