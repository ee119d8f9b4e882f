"""What a backend of the expert MLP provides: the operations over which autograd is written once.

`kernels.expert_mlp.autograd` calls them in the order of the data flow: plan; fc1_act, rows (fc2)
and combine forward; fc2_dgrad_dact, wgrad, bias_grad, rows (fc1 dgrad) and combine backward. A
backend decides what it fuses inside an operation. Rows s >= offsets[L] are padding: an operation
may write anything there, and must not let what it finds there (NaN included) reach any other row or
any sum.

A recipe (`kernels.quantize.recipe`) is a matter of the backend: what `quantize` and `columns` make,
fc1_act, rows and wgrad take. Without one they return what they are given.

Where experts of other ranks are replicas, a plan has places for both, and a `Linear` leads to
theirs: fc1_act, rows and fc2_dgrad_dact make rows of own experts first and then, into the same
tensors, those of replicas. wgrad and bias_grad are called for either with its part of the plan.

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
"""What a backend's `wgrad` takes: a Tensor of expert rows, or `QuantizedColumns` with a recipe."""


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
    parts: int = 1
    """Equal runs of O, such as a gate and a linear half, in which blocks of a recipe start anew."""
    parts_in: int = 1
    """Of I."""
    flipped: bool = False
    """The weights are a view of stored [L, I, O]: the layer is that of a data gradient."""
    source: Tensor | None = None
    """The parameter of the weights: a backend may leave something with it until they change."""
    alpha_L: Tensor | None = None
    """fp32: what sums are multiplied by before the bias is added; None: 1. Of `reference` and
    `torch` alone, for operands whose tensors have scales."""
    replicas: "Callable[[bool], Linear] | None" = None
    """That of the replicas, at the places behind these experts'; called when the work of these has
    been launched, as they may be on their way until then, with whether the caller's kernel waits
    for `ready`. None: there are none."""
    ready: Tensor | None = None
    """Of replicas: what has to be waited for before their weights are read
    (`kernels.sm90.exchange.ready`). None: nothing."""

    @classmethod
    def alone(cls, w_OI: Tensor, bias_O: Tensor | None = None, parts: int = 1) -> "Linear":
        """That of a plan whose rows are all one expert's."""
        return cls(w_OI[None], None if bias_O is None else bias_O[None], parts, source=w_OI)

    @property
    def transposed(self) -> "Linear":
        """The data gradient's: a view of the weights, without the biases."""

        def one(linear: Linear) -> Linear:
            w_LIO, source, alpha_L = linear.weight_LOI.mT, linear.source, linear.alpha_L
            parts = linear.parts_in, linear.parts
            return Linear(w_LIO, None, *parts, not linear.flipped, source, alpha_L)

        return self.mapped(one)

    def mapped(self, fn: "Callable[[Linear], Linear]") -> "Linear":
        """`fn` of these experts, and of the replicas when it is their turn."""
        replicas, made = self.replicas, fn(self)
        return made if replicas is None else made._replace(replicas=lambda _: fn(replicas(False)))

    def before(self, replicas: "Linear", arrive: Callable[[bool], Tensor | None]) -> "Linear":
        """With replicas behind these experts. `arrive` is called before it is their turn, with
        whether the kernel waits for what it returns."""
        return self._replace(replicas=lambda waits: replicas._replace(ready=arrive(waits)))

    def after(self, fn: Callable[[], Any]) -> "Linear":
        """The same, where `fn` is called before it is the replicas' turn."""
        replicas = self.replicas
        if replicas is None:
            return self

        def then(waits: bool) -> Linear:
            fn()
            return replicas(waits)

        return self._replace(replicas=then)

    def runs(
        self, plan: ExpertPlan, *, waits: bool = False
    ) -> "Iterator[tuple[Linear, ExpertPlan]]":
        """Layer and part of the plan of own experts, and then of replicas if there are any;
        `waits`: kernels wait for these by `ready`."""
        if self.replicas is None:
            yield self, plan
            return
        own, of_replicas = plan.split(len(self.weight_LOI))
        yield self, own
        replicas = self.replicas(waits)
        if len(replicas.weight_LOI):
            yield replicas, of_replicas

    @property
    def whole(self) -> "Linear":
        """Own experts and replicas in one layer, which copies all weights: for a backend that has
        one call for all experts of a plan."""
        if self.replicas is None:
            return self
        both = self, self.replicas(False)
        stored = torch.cat([x.weight_LOI.mT if x.flipped else x.weight_LOI for x in both])
        return self._replace(
            weight_LOI=stored.mT if self.flipped else stored,
            bias_LO=_together([x.bias_LO for x in both]),
            source=None,
            alpha_L=_together([x.alpha_L for x in both]),
            replicas=None,
        )

    @property
    def biases_PO(self) -> Tensor | None:
        """Of own experts and replicas."""
        if self.replicas is None or self.bias_LO is None:
            return self.bias_LO
        return _together([self.bias_LO, self.replicas(False).bias_LO])


class Operand(NamedTuple):
    """A matrix with a row for every expert row, or for every row of x."""

    matrix: Rows | Columns
    """[S, ...]; or [N, ...] with `gather`: then row s of it is matrix[row_index[s]]."""
    gather: bool = False
    parts: int = 1
    """Of its channels; see `Linear`."""
    gradient: bool = False
    """A recipe may have another format, or another rounding, for gradients."""


class HiddenGrads(NamedTuple):
    """What `Backend.fc2_dgrad_dact` makes of the gradient of an expert MLP's output."""

    dh_SH: Rows
    """For the data gradient."""
    a_SF: Rows | Columns
    """Activations, recomputed from h, for `columns`."""
    dprob_S: Tensor | None
    """fp32, exactly 0 in the padding; None if the plan has no probabilities."""
    db1_LH: Tensor | None
    """fp32 if it comes for free, None otherwise (then `bias_grad` makes it)."""
    dh_columns: Columns | None = None
    """For `columns`; None: dh_SH."""


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

    def quantize(self, x: Rows, *, gradient: bool = False) -> Rows:
        """Rows as the GEMMs take them; those that are so already as they are."""
        ...

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        """Rows as `wgrad` takes them, whose contraction runs over rows; those that are so already
        as they are."""
        ...

    def rows_and_columns(
        self, a_SI: Rows | None, linear: Linear, plan: ExpertPlan, operands: Sequence[Operand]
    ) -> tuple[Tensor | None, list[Operand]]:
        """`rows` of a, None without, and `columns` of operands: a backend may make them at the
        same time."""
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
            keep_h: without it h may be None.
            ready: what to wait for before rows of x are read (`kernels.sm90.exchange.ready`, for
                the fused backend alone); None: all have arrived.
        """
        ...

    def rows(self, a_SI: Rows, linear: Linear, plan: ExpertPlan, *, signal: Any = None) -> Tensor:
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
            d, v: of O and I channels; not both are gathered. What `columns` has made is of all
                places, also where the plan is a part.
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


def _together(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Of all parts, or of none."""
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def tensors_of(rows: Rows) -> tuple[Tensor, ...]:
    """What autograd can take and save of rows."""
    return tuple(rows) if isinstance(rows, Quantized) else (rows,)


def rows_of(tensors: Sequence[Tensor]) -> Rows:
    """The inverse of `tensors_of`."""
    return Quantized(*tensors) if len(tensors) == 2 else tensors[0]


class InTurn:
    """Of a backend that does one thing at a time."""

    def rows_and_columns(
        self: Backend,
        a_SI: Rows | None,
        linear: Linear,
        plan: ExpertPlan,
        operands: Sequence[Operand],
    ) -> tuple[Tensor | None, list[Operand]]:
        y_SO = None if a_SI is None else self.rows(a_SI, linear, plan)
        return y_SO, [self.columns(x, plan) for x in operands]


class AsTheyAre(InTurn):
    """Of a backend without a recipe: operands are what they were given as."""

    def quantize(self, x: Tensor, *, gradient: bool = False) -> Tensor:
        return x

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        return x


def put(value: Tensor, into: Buffer | None) -> Tensor:
    """`value`, or the buffer after it was written there or added to what was there."""
    if into is None:
        return value
    return into.out.add_(value) if into.add else into.out.copy_(value)
