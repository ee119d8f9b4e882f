"""Backend of the expert MLP for plans that have replicas behind a rank's own experts.

A call for rows goes to the backend of own experts first and then, once their weights have arrived,
for replicas into the same tensors, if that backend can (`takes_parts`): neither weights nor
gradients are copied to be contiguous with others, and the work of own experts overlaps the transfer
of replicas. Other backends take all experts in one call, with concatenated weights.

Legend: L own experts, G replica slots, P = L + G experts of a plan.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import (
    Backend,
    DelegatingMixin,
    HiddenGrads,
    takes_parts,
)
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    Rows,
    RowsCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.mlp_spec import Layer, MLPWeights, layer_pair


class BorrowedWeights(NamedTuple):
    """Weights of replicas in one pass."""

    weights: MLPWeights  # [G, ...], not to be read before `arrive`
    arrive: Callable[[Layer, bool], Tensor | None]
    """Waits for the weights of a layer and for their rows; repeated calls do nothing. If the
    caller's kernel can wait for weights itself (the second argument), it waits only for the rows
    and returns the flags for the kernel; None: nothing is left to wait for."""


class ReplicatedBackend(DelegatingMixin):
    """`kernels.expert_mlp.backend.Backend` of one pass, around that of a rank's own experts.

    An operation waits for the weights of replicas that it reads, and for their rows. wgrad and
    bias_grad take one part of the plan.

    Args:
        inner: backend of own experts.
        own: weights of own experts [L, ...]; the `source` of a layer is one of them.
        replicas: weights of replicas.
    """

    writes_into_out: ClassVar[bool] = False

    def __init__(self, inner: Backend, own: MLPWeights, replicas: BorrowedWeights) -> None:
        self._inner, self._own, self._borrowed = inner, own, replicas

    @property
    def fuses_gather(self) -> bool:
        return self._inner.fuses_gather

    def rows_and_columns(
        self,
        call: RowsCall | None,
        plan: ExpertPlan,
        operands: Sequence[Operand],
        rows: Callable[[RowsCall], Tensor] | None = None,
    ) -> tuple[Tensor | None, list[Operand]]:
        return self._inner.rows_and_columns(call, plan, operands, rows or self.rows)

    def fc1_act(self, call: Fc1Call) -> tuple[Rows | None, Rows]:
        inner = self._inner
        if not takes_parts(inner):
            return inner.fc1_act(call._replace(fc1=self._concatenated(call.fc1), ready=None))
        own_plan, replica_plan = self._split(call.plan)
        out = inner.fc1_act(call._replace(plan=own_plan))
        ready = self._arrive(call.fc1, call.plan.row_index_S is not None)
        replicas = self._replicas(call.fc1)
        if not len(replicas.weight_LOI):
            return out
        return inner.fc1_act(call._replace(fc1=replicas, plan=replica_plan, ready=ready, out=out))

    def rows(self, call: RowsCall) -> Tensor:
        inner = self._inner
        if call.signal is None and not takes_parts(inner):
            return inner.rows(call._replace(linear=self._concatenated(call.linear)))
        own_plan, replica_plan = self._split(call.plan)
        y_SO = inner.rows(call._replace(plan=own_plan))
        if call.after_signal is not None:
            call.after_signal()
        self._arrive(call.linear)
        replicas = self._replicas(call.linear)
        if not len(replicas.weight_LOI):
            return y_SO
        call = call._replace(linear=replicas, plan=replica_plan, signal=None, out=y_SO)
        return inner.rows(call)

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        inner, fc2, plan = self._inner, call.fc2, call.plan
        if not takes_parts(inner):
            return inner.fc2_dgrad_dact(call._replace(fc2=self._concatenated(fc2), ready=None))
        own_plan, replica_plan = self._split(plan)
        rows = inner.fc2_dgrad_rows(call._replace(plan=own_plan))
        ready = self._arrive(fc2, call.dy.gather and plan.row_index_S is not None)
        replicas = self._replicas(fc2)
        if len(replicas.weight_LOI):
            rows = inner.fc2_dgrad_rows(
                call._replace(fc2=replicas, plan=replica_plan, ready=ready, out=rows)
            )
        if plan.row_prob_S is not None and fc2.bias_LO is not None:
            self._arrive(fc2)  # what reads biases does not wait
            fc2 = fc2._replace(bias_LO=_cat(fc2.bias_LO, replicas.bias_LO))
        return inner.finish_fc2_dgrad(rows, call._replace(fc2=fc2))

    def _split(self, plan: ExpertPlan) -> tuple[ExpertPlan, ExpertPlan]:
        return plan.split(len(self._own.w1))

    def _layer(self, linear: Linear) -> Layer:
        return "fc1" if linear.source is self._own.w1 else "fc2"

    def _arrive(self, linear: Linear, gathers: bool = False) -> Tensor | None:
        """Wait for replicas of a layer, or return the flags for a kernel that gathers its rows."""
        inner = self._inner
        kernel_waits = gathers and takes_parts(inner) and inner.waits_for_weights
        return self._borrowed.arrive(self._layer(linear), kernel_waits)

    def _replicas(self, linear: Linear) -> Linear:
        """The same layer of the replicas, not to be read before `_arrive`."""
        w_GOI, bias_GO = layer_pair(self._borrowed.weights, self._layer(linear))
        assert w_GOI is not None
        return linear._replace(
            weight_LOI=w_GOI.mT if linear.is_transposed else w_GOI,
            bias_LO=None if linear.bias_LO is None else bias_GO,
            source=None,
        )

    def _concatenated(self, linear: Linear) -> Linear:
        """Own experts and replicas in one layer: a copy of all weights."""
        self._arrive(linear)
        replicas = self._replicas(linear)
        both = linear.weight_LOI, replicas.weight_LOI
        if linear.is_transposed:
            weight_POI = torch.cat([w_LOI.mT for w_LOI in both]).mT
        else:
            weight_POI = torch.cat(both)
        bias_PO = _cat(linear.bias_LO, replicas.bias_LO)
        return linear._replace(weight_LOI=weight_POI, bias_LO=bias_PO, source=None)


def _cat(own: Tensor | None, replicas: Tensor | None) -> Tensor | None:
    return None if own is None or replicas is None else torch.cat([own, replicas])
