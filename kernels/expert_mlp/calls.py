"""Operands and calls of the operations of `kernels.expert_mlp.backend`, one value for each call.

Shape legend: N rows of x, S expert rows, L local experts, D hidden, F expert width, H = 2F or F
rows of W1, I channels in, O channels out, e(s) the expert of row s.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.quantize.blocks import Quantized

type Rows = Any
"""Rows of channels as a backend's GEMMs take them: a Tensor, or `Quantized` with a recipe."""
type Columns = Any
"""Operand of `wgrad`: a Tensor of expert rows, or `QuantizedColumns` with a recipe."""


class Linear(NamedTuple):
    """A linear layer of every expert."""

    weight_LOI: Tensor
    bias_LO: Tensor | None = None
    parts: int = 1
    """Equal ranges of O, such as gate and up channels; no block of a recipe crosses a border."""
    parts_in: int = 1
    """Equal ranges of I."""
    is_transposed: bool = False
    """The weights are a view of stored [L, I, O]: the layer is that of a data gradient."""
    source: Tensor | None = None
    """Parameter of the weights: a backend may cache data on it until the weights change."""
    alpha_L: Tensor | None = None
    """fp32 factor on the product before the bias is added; None: 1. Only `reference` and `torch`
    take it, for operands with a scale per tensor."""
    replicas: "Callable[[bool], Linear] | None" = None
    """Layer of the replicas, whose slots follow these experts. It is called once the kernels of
    these experts are launched, because the weights may be in flight until then; the argument says
    whether the caller's kernel waits for `ready` itself. None: no replicas."""
    ready: Tensor | None = None
    """Flags to wait for before the weights of replicas are read (`kernels.sm90.exchange.ready`).
    None: no wait."""

    @classmethod
    def single_expert(cls, w_OI: Tensor, bias_O: Tensor | None = None, parts: int = 1) -> "Linear":
        """A dense layer: one expert that has all rows."""
        return cls(w_OI[None], None if bias_O is None else bias_O[None], parts, source=w_OI)

    @property
    def transposed(self) -> "Linear":
        """The layer of the data gradient: a view of the weights, without the biases."""

        def transpose(linear: Linear) -> Linear:
            w_LIO, source, alpha_L = linear.weight_LOI.mT, linear.source, linear.alpha_L
            parts = linear.parts_in, linear.parts
            return Linear(w_LIO, None, *parts, not linear.is_transposed, source, alpha_L)

        return self.map_experts(transpose)

    def map_experts(self, fn: "Callable[[Linear], Linear]") -> "Linear":
        """`fn` of these experts, and later of the replicas."""
        replicas, mapped = self.replicas, fn(self)
        return (
            mapped if replicas is None else mapped._replace(replicas=lambda _: fn(replicas(False)))
        )

    def with_replicas(
        self, replicas: "Linear", arrive: Callable[[bool], Tensor | None]
    ) -> "Linear":
        """The layer with replicas behind these experts.

        Args:
            replicas: their layer.
            arrive: called before their kernels are launched, with whether the kernel waits for the
                flags that `arrive` returns.
        """
        return self._replace(
            replicas=lambda kernel_waits: replicas._replace(ready=arrive(kernel_waits))
        )

    def before_replicas(self, fn: Callable[[], Any]) -> "Linear":
        """The same layer, where `fn` is called before the kernels of the replicas are launched."""
        replicas = self.replicas
        if replicas is None:
            return self

        def call_first(kernel_waits: bool) -> Linear:
            fn()
            return replicas(kernel_waits)

        return self._replace(replicas=call_first)

    def expert_groups(
        self, plan: ExpertPlan, *, kernel_waits: bool = False
    ) -> "Iterator[tuple[Linear, ExpertPlan]]":
        """Layer and part of the plan of own experts, and then of replicas if there are any.

        Args:
            plan: of all of them.
            kernel_waits: kernels of replicas wait for `ready` themselves.
        """
        if self.replicas is None:
            yield self, plan
            return
        own_plan, replica_plan = plan.split(len(self.weight_LOI))
        yield self, own_plan
        replicas = self.replicas(kernel_waits)
        if len(replicas.weight_LOI):
            yield replicas, replica_plan

    @property
    def concatenated(self) -> "Linear":
        """Own experts and replicas in one layer: a copy of all weights.

        For a backend that has one call for all experts of a plan.
        """
        if self.replicas is None:
            return self
        both = self, self.replicas(False)
        stored = torch.cat([x.weight_LOI.mT if x.is_transposed else x.weight_LOI for x in both])
        return self._replace(
            weight_LOI=stored.mT if self.is_transposed else stored,
            bias_LO=_cat([x.bias_LO for x in both]),
            source=None,
            alpha_L=_cat([x.alpha_L for x in both]),
            replicas=None,
        )

    @property
    def all_biases_PO(self) -> Tensor | None:
        """Biases of own experts and replicas."""
        if self.replicas is None or self.bias_LO is None:
            return self.bias_LO
        return _cat([self.bias_LO, self.replicas(False).bias_LO])


class Operand(NamedTuple):
    """A matrix with a row for every expert row, or for every row of x."""

    matrix: Rows | Columns
    """[S, ...]; or [N, ...] with `gather`: then expert row s is matrix[row_index[s]]."""
    gather: bool = False
    parts: int = 1
    """Equal ranges of its channels; see `Linear`."""
    gradient: bool = False
    """A gradient, for which a recipe may have another format or another rounding."""


class Fc1Call(NamedTuple):
    """Call of `Backend.fc1_act`."""

    x_ND: Rows
    fc1: Linear
    """w1 [L, H, D] and b1 [L, H]."""
    plan: ExpertPlan
    act: Activation
    keep_h: bool = True
    """h is returned; otherwise it may be None."""
    ready: Tensor | None = None
    """Flags to wait for before rows of x are read (`kernels.sm90.exchange.ready`, only for the
    fused backend). None: all rows have arrived."""


class RowsCall(NamedTuple):
    """Call of `Backend.rows`."""

    a_SI: Rows
    linear: Linear
    """Weights [L, O, I], which may be a transposed view, and biases [L, O]."""
    plan: ExpertPlan
    signal: Any = None
    """Completion signal of each tile and the memory of y
    (`kernels.sm90.exchange.tile_progress.TileSignal`, only for the fused backend). None: no signal,
    and y is a new tensor."""


class Fc2DgradCall(NamedTuple):
    """Call of `Backend.fc2_dgrad_dact`."""

    dy: Operand
    """Gradient of fc2's output, of D channels."""
    fc2: Linear
    """w2 [L, D, F] and b2 [L, D]."""
    h_SH: Rows
    plan: ExpertPlan
    act: Activation
    ready: Tensor | None = None
    """Flags to wait for before rows of dy are read, as in `Fc1Call`."""


class WgradCall(NamedTuple):
    """Call of `Backend.wgrad`."""

    d: Operand
    """Gradient of O channels. Not both operands are gathered; results of `Backend.columns` cover
    all experts and replicas, even if the plan is a part."""
    v: Operand
    """Input of I channels."""
    plan: ExpertPlan
    into: Buffer | None = None
    """Destination [L, O, I], fp32 or as d. None: a new tensor in the dtype of d."""


class BiasGradCall(NamedTuple):
    """Call of `Backend.bias_grad`."""

    d: Operand
    """Gradient of O channels."""
    plan: ExpertPlan
    scale: bool
    """Rows are multiplied by their probabilities."""
    into: Buffer | None = None
    """Destination [L, O], fp32 or as d. None: a new tensor in fp32."""


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def tensors_of(rows: Rows) -> tuple[Tensor, ...]:
    """Tensors of rows, which autograd can take and save."""
    return tuple(rows) if isinstance(rows, Quantized) else (rows,)


def rows_of(tensors: Sequence[Tensor]) -> Rows:
    """The inverse of `tensors_of`."""
    return Quantized(*tensors) if len(tensors) == 2 else tensors[0]
