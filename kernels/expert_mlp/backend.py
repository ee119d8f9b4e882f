"""What a backend of the expert MLP provides: the operations over which autograd is written once.

`kernels.expert_mlp.autograd` calls them in the order of the data flow: plan; fc1_act, rows (fc2)
and combine forward; fc2_dgrad_dact, wgrad, bias_grad, rows (fc1 dgrad) and combine backward. A
backend decides what it fuses inside an operation. Rows s >= offsets[L] are padding: an operation
may write anything there, and must not let what it finds there (NaN included) reach any other row or
any sum.

Shape legend: N rows of x, K experts per token, S expert rows, L local experts, D hidden, F expert
width, H = 2F or F rows of W1, e(s) the expert of row s. GEMMs accumulate in fp32.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer


class PlanSize(NamedTuple):
    """What a plan is made for, beside the routing."""

    first_expert: int
    """Global id of local expert 0."""
    local_experts: int
    """L."""
    rows: int
    """S. If more are needed the last experts lack rows."""


class Linear(NamedTuple):
    """A linear layer of every expert."""

    weight_LOI: Tensor
    bias_LO: Tensor | None = None

    @property
    def transposed(self) -> "Linear":
        """The data gradient's: a view of the weights, without the biases."""
        return Linear(self.weight_LOI.transpose(1, 2))


class Operand(NamedTuple):
    """A matrix with a row for every expert row, or for every row of x."""

    matrix: Tensor
    """[S, ...]; or [N, ...] with `gather`: then row s of it is matrix[row_index[s]]."""
    gather: bool = False


class HiddenGrads(NamedTuple):
    """What `Backend.fc2_dgrad_dact` makes of the gradient of an expert MLP's output."""

    dh_SH: Tensor
    a_SF: Tensor
    """Activations, recomputed from h."""
    dprob_S: Tensor | None
    """fp32, exactly 0 in the padding; None if the plan has no probabilities."""
    db1_LH: Tensor | None
    """fp32 if it comes for free, None otherwise (then `bias_grad` makes it)."""


class Backend(Protocol):
    """The operations. Results have the dtype of their first argument where nothing else is said."""

    gathers: ClassVar[bool]
    """Whether an operation that gathers is as good as one on rows that were gathered before."""

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan:
        """Expert rows of the pairs whose expert is local, as `kernels.routing.plan` says."""
        ...

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        """dprob[inverse[n, k]] for each pair, 0 where that is -1: the gradient of topk_prob."""
        ...

    def fc1_act(
        self,
        x_ND: Tensor,
        fc1: Linear,
        plan: ExpertPlan,
        act: Activation,
        *,
        keep_h: bool = True,
        ready: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """h_SH = x[index] @ w1[e]^T + b1[e], rounded; a_SF = act(h) * prob in fp32, rounded.

        Args:
            keep_h: without it h may be None.
            ready: what to wait for before rows of x are read (`kernels.sm90.exchange.ready`, for
                the fused backend alone); None: all have arrived.
        """
        ...

    def rows(self, a_SI: Tensor, linear: Linear, plan: ExpertPlan, *, signal: Any = None) -> Tensor:
        """y_SO = a @ w[e]^T + bias[e] * prob. The weights may be a transposed view.

        Args:
            signal: per-tile completion signal, and where y is written
                (`kernels.sm90.exchange.tile_progress.TileSignal`, for the fused backend alone);
                None: no signal, and y is a new tensor.
        """
        ...

    def fc2_dgrad_dact(
        self,
        dy: Operand,
        fc2: Linear,
        h_SH: Tensor,
        plan: ExpertPlan,
        act: Activation,
        *,
        ready: Tensor | None = None,
    ) -> HiddenGrads:
        """Gradient of h, activations and gradient of prob from dy; `ready` as in `fc1_act`."""
        ...

    def wgrad(self, d: Operand, v: Operand, plan: ExpertPlan, into: Buffer | None = None) -> Tensor:
        """dw_LOI = sum over the rows of each expert of d^T v; 0 for an expert without rows.

        Args:
            d, v: of O and I channels; not both are gathered.
            into: [L, O, I], fp32 or as d; None: a new tensor in the dtype of d.

        Returns:
            The tensor of `into`, or the new one.
        """
        ...

    def bias_grad(
        self, d: Operand, plan: ExpertPlan, *, scale: bool, into: Buffer | None = None
    ) -> Tensor:
        """db_LO = sum over the rows of each expert of d, or of d * prob when `scale`.

        `into` as in `wgrad`, but the default is a new tensor in fp32.
        """
        ...

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        """out[n] = sum of y[inverse[n, k]] in the order k = 0 .. K - 1, in fp32, rounded once; and
        then `plus` addends [N, D], which a backend may add before it rounds."""
        ...


def put(value: Tensor, into: Buffer | None) -> Tensor:
    """`value`, or the buffer after it was written there or added to what was there."""
    if into is None:
        return value
    return into.out.add_(value) if into.add else into.out.copy_(value)
