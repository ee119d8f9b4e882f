"""Gradients of the weights and biases of an expert MLP, after the data gradient.

Where experts of other ranks are replicas they are made twice of the same rows, for replicas and for
own experts. Whatever has been read for the last time is let go of at once: these are the largest
tensors of the backward pass.

Shape legend as in `kernels.backend`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Backend, Operand, Rows, put
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer

type Buffers = Sequence[Buffer | None]
"""For the gradients of a layer's weight and bias."""
type Gradients = tuple[Tensor | None, Tensor | None]


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

    def all(self, buffers: Sequence[Buffer | None]) -> list[Tensor | None]:
        """Gradients of w1, w2, b1 and b2 of all places, None where they are not wanted.

        Args:
            buffers: where they go; None: to new tensors.
        """
        dw2, db2 = self.of_fc2(self.plan, buffers[1::2])
        dw1, db1 = self.of_fc1(self.plan, buffers[::2])
        return [dw1, dw2, db1, db2]

    def of_fc1(self, plan: ExpertPlan, buffers: Buffers, *, last: bool = True) -> Gradients:
        """Gradients of w1 and b1, None where they are not wanted.

        Args:
            plan: of all places, or a part of it.
            buffers: where they go; None: to new tensors.
            last: there is no other part to come.
        """
        need_w, _, need_b, _ = self.needs
        dw = db = None
        if self.tokens is not None:
            x = Operand(self.tokens(), gather=plan.row_index_S is not None)
            self.of_w1, self.tokens = [*self.of_w1, x], None
        if need_w:
            self.of_w1 = self._columns(self.of_w1)
            dh, x = self.of_w1
            dw = self.ops.wgrad(dh, x, plan, buffers[0])
            del dh, x
        if need_b and self.db1_LH is not None:
            db = put(plan.of_these(self.db1_LH), buffers[1])
        elif need_b and self.of_b1 is not None:
            db = self.ops.bias_grad(self.of_b1, plan, scale=False, into=buffers[1])
        if last:
            self.of_w1, self.of_b1 = [], None
        return dw, db

    def of_fc2(self, plan: ExpertPlan, buffers: Buffers, *, last: bool = True) -> Gradients:
        """The same of w2 and b2."""
        _, need_w, _, need_b = self.needs
        dw = db = None
        if need_w:
            self.of_w2 = self._columns(self.of_w2)
            dy, a = self.of_w2
            dw = self.ops.wgrad(dy, a, plan, buffers[0])
            del dy, a
        if need_b and self.of_b2 is not None:
            scaled = plan.row_prob_S is not None
            db = self.ops.bias_grad(self.of_b2, plan, scale=scaled, into=buffers[1])
        if last:
            self.of_w2, self.of_b2 = [], None
        return dw, db

    def _columns(self, operands: list[Operand]) -> list[Operand]:
        return [self.ops.columns(x, self.plan) for x in operands]
