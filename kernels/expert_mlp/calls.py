"""Operands and calls of the operations of `kernels.expert_mlp.backend`, one value for each call.

Shape legend: N rows of x, S expert rows, L local experts, D hidden, F expert width, H = 2F or F
rows of W1, I channels in, O channels out, e(s) the expert of row s.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.quantize.blocks import Quantized

type Rows = Any  # for a backend's GEMMs: Tensor, or `Quantized` with a recipe
type Columns = Any  # operand of `wgrad`: Tensor of rows, or `QuantizedColumns`


class Linear(NamedTuple):
    """A linear layer of every expert."""

    weight_LOI: Tensor
    bias_LO: Tensor | None = None
    parts: int = 1  # equal ranges of O, such as gate and up; no block of a recipe crosses a border
    parts_in: int = 1  # equal ranges of I
    is_transposed: bool = False  # weights view stored [L, I, O]: the layer of a data gradient
    source: Tensor | None = None  # the parameter; a backend may cache data on it
    alpha_L: Tensor | None = None
    """fp32 factor on the product before the bias; None: 1. Only `reference` and `torch` take it,
    for operands with a scale per tensor."""

    @classmethod
    def single_expert(cls, w_OI: Tensor, bias_O: Tensor | None = None, parts: int = 1) -> "Linear":
        """A dense layer: one expert that has all rows."""
        return cls(w_OI[None], None if bias_O is None else bias_O[None], parts, source=w_OI)

    @property
    def transposed(self) -> "Linear":
        """The layer of the data gradient: a view of the weights, without biases."""
        return self._replace(
            weight_LOI=self.weight_LOI.mT,
            bias_LO=None,
            parts=self.parts_in,
            parts_in=self.parts,
            is_transposed=not self.is_transposed,
        )


class Operand(NamedTuple):
    """A matrix with a row for every expert row, or for every row of x."""

    matrix: Rows | Columns  # [S, ...]; with `gather` [N, ...]: row s is matrix[row_index[s]]
    gather: bool = False
    parts: int = 1  # equal ranges of its channels; see `Linear`
    gradient: bool = False  # for which a recipe may have another format or rounding


class ExpertRows(NamedTuple):
    """Operands of a weight gradient, and the rows of each expert."""

    d: Operand  # gradient of O channels
    v: Operand  # input of I channels
    offsets: Tensor  # int32 [L + 1]: expert e has rows offsets[e] to offsets[e + 1]
    index_S: Tensor | None = None  # int32, of the operand with `gather`; not both have it


type HiddenRows = tuple[Rows, Rows, Tensor | None]  # gradient of h, activations, parts of dprob


class Fc1Call(NamedTuple):
    """Call of `Backend.fc1_act`."""

    x_ND: Rows
    fc1: Linear  # w1 [L, H, D] and b1 [L, H]
    plan: ExpertPlan
    act: Activation
    keep_h: bool = True  # h is returned; otherwise it may be None
    ready: Tensor | None = None
    """Flags to wait for before an expert's rows of x and its weights are read
    (`kernels.sm90.exchange.waves`, fused backend only). None: all have arrived."""
    out: tuple[Rows | None, Rows] | None = None
    """Result for another part of the plan, to write to (`writes_into_out`)."""


class RowsCall(NamedTuple):
    """Call of `Backend.rows`."""

    a_SI: Rows
    linear: Linear  # weights [L, O, I], which may be a transposed view, and biases [L, O]
    plan: ExpertPlan
    signal: Any = None
    """Completion signal of each tile and the memory of y
    (`kernels.sm90.exchange.waves.TileSignal`, fused backend only)."""
    after_signal: Callable[[], object] | None = None
    """Called after the launch that signals, if other kernels follow."""
    out: Tensor | None = None  # result of the call for another part, as in `Fc1Call`
    free_sms: int = 0  # beyond the backend's margin, for kernels that overlap


class Fc2DgradCall(NamedTuple):
    """Call of `Backend.fc2_dgrad_dact`."""

    dy: Operand  # gradient of fc2's output, of D channels
    fc2: Linear  # w2 [L, D, F] and b2 [L, D]
    h_SH: Tensor
    plan: ExpertPlan
    act: Activation
    ready: Tensor | None = None  # flags to wait for before rows of dy are read, as in `Fc1Call`
    out: HiddenRows | None = None  # result of the call for another part, as in `Fc1Call`


class WgradCall(NamedTuple):
    """Call of `Backend.wgrad`."""

    d: Operand
    """Gradient of O channels. Not both operands are gathered; results of `Backend.columns` cover
    all experts, even if the plan is a part."""
    v: Operand  # input of I channels
    plan: ExpertPlan
    into: Buffer | None = None  # [L, O, I], fp32 or as d; None: new, as d

    @property
    def rows(self) -> ExpertRows:
        plan, gathers = self.plan, self.d.gather or self.v.gather
        return ExpertRows(self.d, self.v, plan.offsets, plan.row_index_S if gathers else None)


class BiasGradCall(NamedTuple):
    """Call of `Backend.bias_grad`."""

    d: Operand  # gradient of O channels
    plan: ExpertPlan
    scale: bool  # rows are multiplied by their probabilities
    into: Buffer | None = None  # [L, O], fp32 or as d; None: new, fp32


def tensors_of(rows: Rows) -> tuple[Tensor, ...]:
    """Tensors of rows, which autograd can take and save."""
    return tuple(rows) if isinstance(rows, Quantized) else (rows,)


def rows_of(tensors: Sequence[Tensor]) -> Rows:
    """The inverse of `tensors_of`."""
    return Quantized(*tensors) if len(tensors) == 2 else tensors[0]
