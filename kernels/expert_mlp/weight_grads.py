"""Gradients of the weights and biases of an expert MLP, after the data gradient.

Where experts of other ranks are guests they are made twice of the same rows, for guests and for own
experts. Whatever has been read for the last time is let go of at once: these are the largest
tensors of the backward pass.

Shape legend as in `kernels.backend`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Backend, Operand, Rows, put
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer


@dataclass
class WeightGrads:
    """What gradients of weights and biases are made of."""

    ops: Backend
    plan: ExpertPlan
    """Of all places."""
    needs: Sequence[bool]
    """Which are wanted of those of w1, w2, b1 and b2."""
    of_w1: list[Operand]
    """The gradient of h, and x unless `tokens` brings it; empty if they are not wanted."""
    of_w2: list[Operand]
    """The gradient of out, and activations."""
    of_b1: Operand | None
    of_b2: Operand | None
    db1_LH: Tensor | None = None
    """If it came for free."""
    tokens: Callable[[], Rows] | None = None
    """x, at its first use."""

    def make(
        self, plan: ExpertPlan, buffers: Sequence[Buffer | None], *, last: bool = True
    ) -> list[Tensor | None]:
        """Gradients of w1, w2, b1 and b2, None where they are not wanted.

        Args:
            plan: of all places, or a part of it.
            buffers: where they go; None: to new tensors.
            last: there is no other part to come.
        """
        need_w1, need_w2, need_b1, need_b2 = self.needs
        dw1 = dw2 = db1 = db2 = None
        if need_w2:
            self.of_w2 = self._columns(self.of_w2)
            dy, a = self.of_w2
            dw2 = self.ops.wgrad(dy, a, plan, buffers[1])
            del dy, a
        if last:
            self.of_w2 = []
        if need_b2 and self.of_b2 is not None:
            scaled = plan.row_prob_S is not None
            db2 = self.ops.bias_grad(self.of_b2, plan, scale=scaled, into=buffers[3])
        if last:
            self.of_b2 = None
        if self.tokens is not None:
            x = Operand(self.tokens(), gather=plan.row_index_S is not None)
            self.of_w1, self.tokens = [*self.of_w1, x], None
        if need_w1:
            self.of_w1 = self._columns(self.of_w1)
            dh, x = self.of_w1
            dw1 = self.ops.wgrad(dh, x, plan, buffers[0])
        if need_b1 and self.db1_LH is not None:
            db1 = put(plan.of_these(self.db1_LH), buffers[2])
        elif need_b1 and self.of_b1 is not None:
            db1 = self.ops.bias_grad(self.of_b1, plan, scale=False, into=buffers[2])
        return [dw1, dw2, db1, db2]

    def _columns(self, operands: list[Operand]) -> list[Operand]:
        return [self.ops.columns(x, self.plan) for x in operands]
