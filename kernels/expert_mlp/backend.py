"""Interface of the expert MLP's backends: the operations over which autograd is written once.

`kernels.expert_mlp.autograd` calls them in the order of the data flow: plan; fc1_act, rows (fc2)
and combine forward; fc2_dgrad_dact, wgrad, bias_grad, rows (fc1 dgrad) and combine backward. A
backend decides what it fuses inside an operation. Rows s >= offsets[L] are padding: an operation
may write anything there, and must not let its content (NaN included) reach any other row or any
sum.

A recipe (`kernels.quantize.recipe`) is a matter of the backend: `quantize` and `columns` produce
the operands of fc1_act, rows and wgrad. Without a recipe they return their argument.

With expert replication, a plan covers the rank's own experts and replicas of other ranks' experts,
and a `Linear` leads to the weights of both: fc1_act, rows and fc2_dgrad_dact compute rows of own
experts first and then, into the same tensors, rows of replicas. wgrad and bias_grad are called for
each part of the plan.

Shape legend: N rows of x, K experts per token, S expert rows, L local experts, D hidden, F expert
width, H = 2F or F rows of W1, e(s) the expert of row s. GEMMs accumulate in fp32.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Columns,
    Fc1Call,
    Fc2DgradCall,
    Operand,
    Rows,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer


class PlanSize(NamedTuple):
    """Sizes of a plan, other than those of the routing."""

    first_expert: int
    """Global id of local expert 0."""
    local_experts: int
    """L."""
    rows: int
    """S. If more are needed, the last experts lack rows."""


class HiddenGrads(NamedTuple):
    """Result of `Backend.fc2_dgrad_dact`."""

    dh_SH: Rows
    """Operand of the data gradient."""
    a_SF: Rows | Columns
    """Activations, recomputed from h, for `columns`."""
    dprob_S: Tensor | None
    """fp32, exactly 0 in the padding; None if the plan has no probabilities."""
    db1_LH: Tensor | None
    """fp32 if the kernel has it as a by-product; None: `bias_grad` computes it."""
    dh_columns: Columns | None = None
    """Gradient of h for `columns`; None: dh_SH."""


class Backend(Protocol):
    """Operations of the expert MLP.

    Results have the dtype of the first argument unless stated otherwise.
    """

    fuses_gather: ClassVar[bool]
    """GEMMs that gather their rows are as fast as GEMMs on gathered rows."""

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan:
        """Expert rows of the pairs whose expert is local (`kernels.routing.plan`)."""
        ...

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        """dprob[inverse[n, k]] for each pair, 0 where that is -1: the gradient of topk_prob."""
        ...

    def quantize(self, x: Rows, *, gradient: bool = False) -> Rows:
        """Rows as the GEMMs take them; quantized rows are returned unchanged."""
        ...

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        """Operand of `wgrad`, whose contraction runs over rows; returned unchanged if it is one."""
        ...

    def rows_and_columns(
        self, call: RowsCall | None, plan: ExpertPlan, operands: Sequence[Operand]
    ) -> tuple[Tensor | None, list[Operand]]:
        """`rows` of the call (None without one) and `columns` of operands, possibly overlapped."""
        ...

    def fc1_act(self, call: Fc1Call) -> tuple[Rows | None, Rows]:
        """h_SH = x[index] @ w1[e]^T + b1[e], rounded; a_SF = act(h) * prob in fp32, rounded."""
        ...

    def rows(self, call: RowsCall) -> Tensor:
        """y_SO = a @ w[e]^T + bias[e] * prob."""
        ...

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        """Gradient of h, activations and gradient of prob from dy."""
        ...

    def wgrad(self, call: WgradCall) -> Tensor:
        """dw_LOI = sum over the rows of each expert of d^T v; 0 for an expert without rows.

        Returns:
            The tensor of `into`, or a new one.
        """
        ...

    def bias_grad(self, call: BiasGradCall) -> Tensor:
        """db_LO = sum over the rows of each expert of d, or of d * prob.

        Returns:
            The tensor of `into`, or a new one.
        """
        ...

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        """out[n] = sum of y[inverse[n, k]] in the order k = 0 .. K - 1, in fp32, rounded once.

        The addends [N, D] are added last; a backend may add them before it rounds.
        """
        ...


class SequentialMixin:
    """`rows_and_columns` without overlap."""

    def rows_and_columns(
        self: Backend, call: RowsCall | None, plan: ExpertPlan, operands: Sequence[Operand]
    ) -> tuple[Tensor | None, list[Operand]]:
        y_SO = None if call is None else self.rows(call)
        return y_SO, [self.columns(x, plan) for x in operands]


class UnquantizedMixin(SequentialMixin):
    """`quantize` and `columns` of a backend without a recipe."""

    def quantize(self, x: Rows, *, gradient: bool = False) -> Rows:
        return x

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        return x


def put(value: Tensor, into: Buffer | None) -> Tensor:
    """Write or add `value` to the buffer and return its tensor; without a buffer return `value`."""
    if into is None:
        return value
    return into.out.add_(value) if into.add else into.out.copy_(value)
