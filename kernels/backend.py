"""What a backend of the expert MLP provides: the operations over which autograd is written once.

`kernels.ops` calls them in the order of the data flow: plan; fc1_act, rows (fc2) and combine
forward; fc2_dgrad_dact, wgrad, bias_grad, rows (fc1 dgrad) and combine backward. A backend decides
what it fuses inside an operation. Rows s >= offsets[L] are padding: an operation may write anything
there, and must not let what it finds there (NaN included) reach any other row or any sum.

Shape legend: N rows of x, K experts per token, S expert rows, L local experts, D hidden, F expert
width, H = 2F or F rows of W1, e(s) the expert of row s. GEMMs accumulate in fp32.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from kernels.activation import Activation


@dataclass(frozen=True)
class Margins:
    """SMs that the kernels of each pass leave free for others, such as communication.

    Only the fused backend can; a margin changes no result and compiles nothing.
    """

    forward: int = 0
    dgrad: int = 0
    """Data gradients: everything of the backward pass that leads to dx and to dprob."""
    wgrad: int = 0
    """Weight and bias gradients."""

    def __post_init__(self) -> None:
        for name in ("forward", "dgrad", "wgrad"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{getattr(self, name)} SMs cannot be left free: set "
                    f"kernels.sm_margin.{name} to 0 or more"
                )


NO_MARGINS = Margins()


class Rows(NamedTuple):
    """Which row of x each expert row reads, and who reads the expert rows back."""

    index_S: Tensor | None
    """int32: row of x. None: expert row s reads row s."""
    prob_S: Tensor | None
    """fp32: routing probability. None: 1."""
    offsets: Tensor
    """int32 [L + 1]: rows offsets[e] to offsets[e + 1] belong to expert e."""
    inverse_NK: Tensor | None
    """int32: expert rows of each row of x, -1 for none. None: row n alone."""
    order_L: Tensor | None = None
    """int32: experts in the order in which a scheduler should take them; None leaves it to it."""
    ready: Tensor | None = None
    """What a kernel that reads rows by `index_S` has to wait for (`kernels.sm90.ready`, for the
    fused backend alone); None: all are there."""
    told: Any = None
    """Whom `rows` tells of finished experts, and where it writes (`kernels.sm90.progress.Told`, for
    the fused backend alone); None: nobody, and to a new tensor."""


class Planned(NamedTuple):
    """Result of `Backend.plan`; see `kernels.plan.Plan`."""

    row_index_S: Tensor
    row_prob_S: Tensor
    offsets: Tensor
    inverse_NK: Tensor
    needed: Tensor
    order_L: Tensor | None


class Backend(Protocol):
    """The operations. Results have the dtype of their first argument where nothing else is said."""

    gathers: ClassVar[bool]
    """Whether an operation that gathers is as good as one on rows that were gathered before."""

    def plan(
        self,
        topk_idx_NK: Tensor,
        topk_prob_NK: Tensor,
        *,
        first_expert: int,
        local_experts: int,
        rows: int,
    ) -> Planned:
        """Expert rows of the pairs whose expert is local, as `kernels.plan.make_plan` says."""
        ...

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        """dprob[inverse[n, k]] for each pair, 0 where that is -1: the gradient of topk_prob."""
        ...

    def fc1_act(
        self,
        x_ND: Tensor,
        w1_LHD: Tensor,
        b1_LH: Tensor | None,
        rows: Rows,
        act: Activation,
        *,
        keep_h: bool = True,
    ) -> tuple[Tensor | None, Tensor]:
        """h_SH = x[index] @ w1[e]^T + b1[e], rounded; a_SF = act(h) * prob in fp32, rounded.

        Without `keep_h` h may be None.
        """
        ...

    def rows(
        self, a_SI: Tensor, w_LOI: Tensor, rows: Rows, bias_LO: Tensor | None = None
    ) -> Tensor:
        """y_SO = a @ w[e]^T + bias[e] * prob. `w_LOI` may be a transposed view."""
        ...

    def fc2_dgrad_dact(
        self,
        dy: Tensor,
        w2_LDF: Tensor,
        b2_LD: Tensor | None,
        h_SH: Tensor,
        rows: Rows,
        act: Activation,
        *,
        gather: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradient of h, activations and gradient of prob from dy.

        Args:
            dy: [S, D]; or [N, D] with `gather`: then row s of it is dy[index[s]].

        Returns:
            dh_SH; a_SF recomputed from h; dprob_S in fp32, exactly 0 in the padding, None if prob
            is; db1_LH in fp32 if it comes for free, None otherwise (then `bias_grad` makes it).
        """
        ...

    def wgrad(
        self,
        d: Tensor,
        v: Tensor,
        rows: Rows,
        *,
        gather_d: bool,
        gather_v: bool,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """dw_LOI = sum over the rows of each expert of d^T v; 0 for an expert without rows.

        Args:
            d, v: [S, O] and [S, I]; with `gather_*` [N, ...], and row s of it is d[index[s]].
            out: [L, O, I] to write to, fp32 or as d; by default a new tensor in the dtype of d.
            accumulate: add to `out`.

        Returns:
            `out`, or the new tensor.
        """
        ...

    def bias_grad(
        self,
        d: Tensor,
        rows: Rows,
        *,
        scale: bool,
        gather: bool,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """db_LO = sum over the rows of each expert of d, or of d * prob when `scale`.

        Args:
            d: [S, O]; or [N, O] with `gather`.
            out, accumulate: as in `wgrad`, but the default is a new tensor in fp32.
        """
        ...

    def combine(self, y_SD: Tensor, inverse_NK: Tensor) -> Tensor:
        """out[n] = sum of y[inverse[n, k]] in the order k = 0 .. K - 1, in fp32, rounded once."""
        ...


def put(value: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    """`value`, or `out` after it was written there or added to what was there."""
    if out is None:
        return value
    return out.add_(value) if accumulate else out.copy_(value)
