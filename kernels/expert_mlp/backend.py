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

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

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


class PlanSize(NamedTuple):
    """Sizes of a plan, other than those of the routing."""

    first_expert: int
    """Global id of local expert 0."""
    local_experts: int
    """L."""
    rows: int
    """S. If more are needed, the last experts lack rows."""


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
        self, a_SI: Rows | None, linear: Linear, plan: ExpertPlan, operands: Sequence[Operand]
    ) -> tuple[Tensor | None, list[Operand]]:
        """`rows` of a (None without a) and `columns` of the operands, possibly overlapped."""
        ...

    def fc1_act(
        self,
        x_ND: Rows,
        fc1: Linear,
        plan: ExpertPlan,
        act: Activation,
        *,
        keep_h: bool = True,
        ready: Tensor | None = None,
    ) -> tuple[Rows | None, Rows]:
        """h_SH = x[index] @ w1[e]^T + b1[e], rounded; a_SF = act(h) * prob in fp32, rounded.

        Args:
            keep_h: return h; otherwise it may be None.
            ready: flags to wait for before rows of x are read (`kernels.sm90.exchange.ready`, only
                for the fused backend); None: all rows have arrived.
        """
        ...

    def rows(self, a_SI: Rows, linear: Linear, plan: ExpertPlan, *, signal: Any = None) -> Tensor:
        """y_SO = a @ w[e]^T + bias[e] * prob. The weights may be a transposed view.

        Args:
            signal: per-tile completion signal and the memory of y
                (`kernels.sm90.exchange.tile_progress.TileSignal`, only for the fused backend);
                None: no signal, and y is a new tensor.
        """
        ...

    def fc2_dgrad_dact(
        self,
        dy: Operand,
        fc2: Linear,
        h_SH: Rows,
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
            d, v: of O and I channels; not both are gathered. Results of `columns` cover all experts
                and replicas, even if the plan is a part.
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
        """out[n] = sum of y[inverse[n, k]] in the order k = 0 .. K - 1, in fp32, rounded once.

        The addends [N, D] are added last; a backend may add them before it rounds.
        """
        ...


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def tensors_of(rows: Rows) -> tuple[Tensor, ...]:
    """Tensors of rows, which autograd can take and save."""
    return tuple(rows) if isinstance(rows, Quantized) else (rows,)


def rows_of(tensors: Sequence[Tensor]) -> Rows:
    """The inverse of `tensors_of`."""
    return Quantized(*tensors) if len(tensors) == 2 else tensors[0]


class SequentialMixin:
    """`rows_and_columns` without overlap."""

    def rows_and_columns(
        self: Backend,
        a_SI: Rows | None,
        linear: Linear,
        plan: ExpertPlan,
        operands: Sequence[Operand],
    ) -> tuple[Tensor | None, list[Operand]]:
        y_SO = None if a_SI is None else self.rows(a_SI, linear, plan)
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
