"""Interface of the expert MLP's backends, over which autograd is written once, and their providers.

`kernels.expert_mlp.autograd` calls the operations in the order of the data flow: plan; fc1_act,
rows (fc2) and combine forward; fc2_dgrad_dact, wgrad, bias_grad, rows (fc1 dgrad) and combine
backward. A backend decides what it fuses inside an operation. Rows s >= offsets[L] are padding: an
operation may write anything there, and must not let its content (NaN included) reach any other row
or any sum. `kernels.registry` decides which backend can run; `provider` does not check, and imports
a backend at its first use, as the compiler of the fused one takes seconds to import.

A recipe (`kernels.quantize.recipe`) is a matter of the backend: `quantize` and `columns` produce
the operands of fc1_act, rows and wgrad. Without one they return their argument. A plan may be one
part of a split plan (`ExpertPlan.split`): then an operation writes the rows of its experts alone.

Shape legend: N rows of x, K experts per token, S expert rows, L local experts, D hidden, F expert
width, H = 2F or F rows of W1, e(s) the expert of row s. GEMMs accumulate in fp32.
"""

import functools
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import ClassVar, NamedTuple, Protocol, TypeGuard

from torch import Tensor

from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.configs.tables.recipes import RECIPES
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Columns,
    Fc1Call,
    Fc2DgradCall,
    HiddenRows,
    Operand,
    Rows,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, PlanSize
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import ChannelOrder
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.quantize.recipe import Recipe


class HiddenGrads(NamedTuple):
    """Result of `Backend.fc2_dgrad_dact`."""

    dh_SH: Rows  # operand of the data gradient
    a_SF: Rows | Columns  # activations, recomputed from h, for `columns`
    dprob_S: Tensor | None  # fp32, exactly 0 in the padding; None if the plan has no probabilities
    db1_LH: Tensor | None  # fp32, as a by-product of the kernel; None: from `bias_grad`
    dh_columns: Columns | None = None  # gradient of h for `columns`; None: dh_SH


class Backend(Protocol):
    """Operations; results have the dtype of the first argument unless stated otherwise."""

    @property
    def fuses_gather(self) -> bool:
        """GEMMs that gather their rows are as fast as GEMMs on gathered rows."""
        ...

    @property
    def writes_into_out(self) -> bool:
        """It is a `BackendOfParts`: fc1_act and rows write a plan's parts to the same `out`."""
        ...

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan: ...

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        """dprob[inverse[n, k]] for each pair, 0 where that is -1: the gradient of topk_prob."""
        ...

    def quantize(self, x: Rows, *, gradient: bool = False) -> Rows:
        """Rows as the GEMMs take them; quantized ones unchanged."""
        ...

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        """Operand of `wgrad`, whose contraction runs over rows; unchanged if it is one."""
        ...

    def rows_and_columns(
        self,
        call: RowsCall | None,
        plan: ExpertPlan,
        operands: Sequence[Operand],
        rows: Callable[[RowsCall], Tensor] | None = None,
    ) -> tuple[Tensor | None, list[Operand]]:
        """`rows` of the call, if any, and `columns` of the plan's operands, possibly overlapped.

        `rows`: computes the call; None: `rows` of this backend.
        """
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
        """dw_LOI = sum over the rows of each expert of d^T v, or 0; in `into`, or new."""
        ...

    def wgrad_pair(self, first: WgradCall, second: WgradCall) -> Tensor:
        """`wgrad` of two micro-batches: the sum over the rows of both, into the buffer of `first`.

        A backend may sum all rows before it rounds, or call `wgrad` twice.
        """
        ...

    def bias_grad(self, call: BiasGradCall) -> Tensor:
        """db_LO = sum over the rows of each expert of d, or of d * prob; in `into`, or new."""
        ...

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        """out[n] = sum of y[inverse[n, k]] in the order k = 0 .. K - 1, in fp32, rounded once.

        The addends [N, D] are added last; a backend may add them before it rounds.
        """
        ...


class BackendOfParts(Backend, Protocol):
    """A backend that computes the rows of a plan's parts into the same tensors.

    fc1_act, rows and fc2_dgrad_rows take the result of one part as `out` of the next.
    """

    @property
    def waits_for_weights(self) -> bool:
        """Kernels that gather their rows wait for `ready` before they read weights."""
        ...

    def fc2_dgrad_rows(self, call: Fc2DgradCall) -> HiddenRows: ...

    def finish_fc2_dgrad(self, rows: HiddenRows, call: Fc2DgradCall) -> HiddenGrads:
        """Result of `fc2_dgrad_dact` from the result of the last part, `rows`.

        `call` is for the whole plan, with the biases of all experts; weights are not read.
        """
        ...


def takes_parts(backend: Backend) -> TypeGuard[BackendOfParts]:
    """True if the backend computes parts of a plan into the same tensors."""
    return backend.writes_into_out


class SequentialMixin:
    """`rows_and_columns` without overlap and `wgrad_pair` one after the other."""

    writes_into_out: ClassVar[bool] = False

    def rows_and_columns(
        self: Backend,
        call: RowsCall | None,
        plan: ExpertPlan,
        operands: Sequence[Operand],
        rows: Callable[[RowsCall], Tensor] | None = None,
    ) -> tuple[Tensor | None, list[Operand]]:
        y_SO = None if call is None else (rows or self.rows)(call)
        return y_SO, [self.columns(x, plan) for x in operands]

    def wgrad_pair(self: Backend, first: WgradCall, second: WgradCall) -> Tensor:
        dw_LOI = self.wgrad(first)
        return self.wgrad(second._replace(into=Buffer(dw_LOI, add=True)))


class UnquantizedMixin(SequentialMixin):
    """`quantize` and `columns` of a backend without a recipe."""

    def quantize(self, x: Rows, *, gradient: bool = False) -> Rows:
        return x

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        return x


class DelegatingMixin:
    """Operations that a backend around another one delegates to it."""

    _inner: Backend

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan:
        return self._inner.plan(topk_idx_NK, topk_prob_NK, size)

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        return self._inner.plan_backward(dprob_S, inverse_NK)

    def quantize(self, x: Rows, *, gradient: bool = False) -> Rows:
        return self._inner.quantize(x, gradient=gradient)

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        return self._inner.columns(x, plan)

    def wgrad(self, call: WgradCall) -> Tensor:
        return self._inner.wgrad(call)

    def wgrad_pair(self, first: WgradCall, second: WgradCall) -> Tensor:
        return self._inner.wgrad_pair(first, second)

    def bias_grad(self, call: BiasGradCall) -> Tensor:
        return self._inner.bias_grad(call)

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        return self._inner.combine(y_SD, inverse_NK, addends)


def put(value: Tensor, into: Buffer | None) -> Tensor:
    """Write or add `value` to the buffer and return its tensor; without a buffer return `value`."""
    if into is None:
        return value
    return into.out.add_(value) if into.add else into.out.copy_(value)


class Options(NamedTuple):
    """Argument of a provider."""

    launch: LaunchOptions = DEFAULT  # options of the launches of its kernels
    recipe: Recipe | None = None  # quantization of its operands
    keep_fp8: bool = False  # FP8 copies of weights are kept until the weights change
    channel_order: ChannelOrder | None = None  # order in which fc1 is stored; None: [gate; up]


def names() -> tuple[str, ...]:
    """Names of the backends of the expert MLP."""
    return tuple(name for name, facts in EXPERT_BACKENDS.items() if facts.provider)


def rows_for(pairs: int, experts: int, name: str) -> int:
    """Number of expert rows that suffices for `pairs`, however they spread over the experts."""
    multiple = EXPERT_BACKENDS[name].pads_rows_to
    return (pairs + experts * (multiple - 1)) // multiple * multiple


@functools.cache
def provider(
    name: str,
    launch: LaunchOptions = DEFAULT,
    recipe: Recipe | None = None,
    keep_fp8: bool = False,
    channel_order: ChannelOrder | None = None,
) -> Backend:
    """The backend called `name`, with the options of `Options`, or its emulation of the recipe.

    Raises ValueError for an unknown name, or a recipe that the backend does not support.
    """
    facts = EXPERT_BACKENDS.get(name)
    if facts is None or not facts.provider:
        known = " or kernels=".join(names())
        raise ValueError(f"kernels.backend={name} has no expert MLP here: use kernels={known}")
    build: Callable[[Options], Backend] = resolve_name(facts.provider)
    if recipe is not None and facts.emulates:
        emulation: Callable[[Backend, Recipe], Backend] = resolve_name(
            RECIPES[recipe.format].emulation
        )
        return emulation(provider(name), recipe)
    return build(Options(launch, recipe, keep_fp8, channel_order))
