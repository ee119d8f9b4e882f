"""What a backend of the expert MLP provides: six operations, over which autograd is written once.

`kernels.grouped_mlp` calls them in the order of the data flow: fc1_act, rows (fc2) and combine
forward; fc2_dgrad_dact, wgrad, bias_grad, rows (fc1 dgrad) and combine backward. A backend decides
what it fuses inside an operation. Rows s >= offsets[L] are padding: an operation may write anything
there, and must not let what it finds there (NaN included) reach any other row or any sum.

Shape legend: N rows of x, K experts per token, S expert rows, L local experts, D hidden, F expert
width, H = 2F or F rows of W1, e(s) the expert of row s. GEMMs accumulate in fp32.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.activation import Activation


class Rows(NamedTuple):
    """Which row of x each expert row reads, and who reads the expert rows back."""

    index_S: Tensor
    """int32: row of x."""
    prob_S: Tensor
    """fp32: routing probability."""
    offsets: Tensor
    """int32 [L + 1]: rows offsets[e] to offsets[e + 1] belong to expert e."""
    inverse_NK: Tensor
    """int32: expert rows of each row of x, -1 for none."""


class Backend(Protocol):
    """The operations. All results have the dtype of their first argument, except dprob (fp32)."""

    def fc1_act(
        self, x_ND: Tensor, w1_LHD: Tensor, b1_LH: Tensor | None, rows: Rows, act: Activation
    ) -> tuple[Tensor, Tensor]:
        """h_SH = x[index] @ w1[e]^T + b1[e], rounded; a_SF = act(h) * prob in fp32, rounded."""
        ...

    def rows(
        self, a_SI: Tensor, w_LOI: Tensor, rows: Rows, bias_LO: Tensor | None = None
    ) -> Tensor:
        """y_SO = a @ w[e]^T + bias[e] * prob. `w_LOI` may be a transposed view."""
        ...

    def fc2_dgrad_dact(
        self,
        dy_SD: Tensor,
        w2_LDF: Tensor,
        b2_LD: Tensor | None,
        h_SH: Tensor,
        rows: Rows,
        act: Activation,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of h, activations and gradient of prob from dy.

        Returns:
            dh_SH; a_SF recomputed from h; dprob_S in fp32, exactly 0 in the padding.
        """
        ...

    def wgrad(self, d_SO: Tensor, v: Tensor, rows: Rows, *, gather: bool) -> Tensor:
        """dw_LOI = sum over the rows of each expert of d^T v; 0 for an expert without rows.

        `v` is [S, I], or x_ND when `gather`: then row s of it is x[index[s]].
        """
        ...

    def bias_grad(self, d_SO: Tensor, rows: Rows, *, scale: bool) -> Tensor:
        """db_LO = sum over the rows of each expert of d, or of d * prob when `scale`."""
        ...

    def combine(self, y_SD: Tensor, inverse_NK: Tensor) -> Tensor:
        """out[n] = sum of y[inverse[n, k]] in the order k = 0 .. K - 1, in fp32, rounded once."""
        ...
