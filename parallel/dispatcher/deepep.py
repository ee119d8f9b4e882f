"""Transport `deepep`: DeepEP's kernels, if the package is installed, as Megatron-Core calls them.

A token goes once to each rank that holds one of its experts, within a node or between nodes. The
host waits for the counts: there is no CUDA graph, expert rows are exactly as many as needed, and no
budget overflows. Received rows are the tokens with an expert on this rank, in the order of ranks
and tokens, not r * T + t; expert rows are the same as on other transports.

Sources: https://github.com/deepseek-ai/DeepEP, megatron.core.transformer.moe.fused_a2a.

Legend: T tokens per rank, D hidden, K expert ids of a token, N received rows.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.providers import rows_for
from phalanx.kernels.refusal import Refusal
from phalanx.kernels.routing.plan import make_plan
from phalanx.parallel.dispatcher.capacity import ROW_MULTIPLE
from phalanx.parallel.dispatcher.costs import GroupTopology, TransportCosts
from phalanx.parallel.dispatcher.received import (
    OverlapFn,
    Planner,
    Received,
    SharedExpertFn,
    plus,
    run_overlap_fn,
)
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Dispatcher


class DeepEP(Dispatcher):
    """The transport `deepep`; `parallel.dispatcher.base` states the contract.

    Args:
        group: the expert-parallel group.
        plan: planner, which checks routing.
        experts: number of experts of all ranks.
        backend: backend of `kernels.routing.plan`.
        sms: number of SMs of its kernels; 0 leaves it to DeepEP.
    """

    no_overlap = "deepep cannot overlap: its counts are waited for"
    bf16_only = True

    def __init__(
        self, group: dist.ProcessGroup, plan: Planner, *, experts: int, backend: str, sms: int
    ) -> None:
        from megatron.core.transformer.moe import fused_a2a

        self._group, self._check, self._backend = group, plan.check, backend
        self._experts, self._fused_a2a = experts, fused_a2a
        if sms:
            fused_a2a.set_deepep_num_sms(sms)

    @classmethod
    def build(cls, context: DispatchContext) -> "DeepEP":
        c, sms = context, context.options.comm_sms
        return cls(c.group, c.plan, experts=c.experts, backend=c.backend, sms=sms)

    @classmethod
    def refuse_here(cls, dtype: torch.dtype) -> Refusal:
        """Reason that this rank cannot use `deepep`, or None. It never raises."""
        if find_spec("deep_ep") is None:
            return "needs the package deep_ep (https://github.com/deepseek-ai/DeepEP)"
        try:
            import_module("deep_ep")
        except Exception as error:  # any kind: the other ranks wait for the answer
            first = (str(error).splitlines() or [repr(error)])[0]
            return f"the package deep_ep cannot be imported: {first}"
        return cls.refuse_dtype(dtype)

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        """Costs of a row to each node with one of its experts, and from there to the ranks."""
        rows = reach.once_a_node
        return TransportCosts(
            rows, rows, saved=int(reach.tokens * reach.wanted_ranks), pipelined=True
        )

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        overlap_fn: OverlapFn = None,
    ) -> Received:
        self._check(x_TD, topk_idx_TK, topk_prob_TK)
        routing = topk_idx_TK.long(), topk_prob_TK
        rows_ND, idx_NK, prob_NK, counts, handle = self._fused_a2a.fused_dispatch(
            x_TD, *routing, self._experts, self._group
        )
        run_overlap_fn(overlap_fn)
        N = len(rows_ND)
        if not N:  # experts need at least one row, which none of them reads
            rows_ND, prob_NK = _append_row(rows_ND, 0), _append_row(prob_NK, 0)
            idx_NK = _append_row(idx_NK, -1)
        pairs = ROW_MULTIPLE * max(1, -(-int(counts.sum()) // ROW_MULTIPLE))
        plan = make_plan(
            idx_NK.int(),  # numbered from this rank's first expert
            prob_NK,
            first_expert=0,
            local_experts=len(counts),
            rows=rows_for(pairs, len(counts), self._backend),
            backend=self._backend,
            experts=len(counts),
        )
        return Received(rows_ND, plan, route=(handle, N))

    def combine(
        self,
        out_ND: Tensor,
        received: Received,
        shared_expert_fn: SharedExpertFn = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        handle, N = received.route
        out_TD, _ = self._fused_a2a.fused_combine(out_ND[:N], self._group, handle)
        return plus(out_TD, shared_expert_fn, residual_TD)


def _append_row(rows: Tensor, value: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, 1), value=value)
