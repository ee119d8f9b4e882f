"""Transport `symm`: one-sided exchanges between the GPUs of a node, over NVLink.

Tokens are pushed once to each rank that holds one of their experts, one sum comes back from each
such rank, and these are added in the order of ranks in fp32 (`kernels.sm90.exchange.exchange`).
With reserved SMs pushes overlap other kernels; results are the same:

    dispatch       fc1 starts with the tokens that have arrived, on the SMs that the push leaves
    fc2            sums leave as soon as a token's last expert on a rank has finished
    data gradient  the gradient of tokens leaves under the weight gradients
    shared expert  runs while tokens and the rest of the sums are in flight

Where passes of two micro-batches run beside each other, each kind of pass has an exchange of its
own, and experts wait for no row: a pass computes while the other one exchanges.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T received rows.
"""

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.kernels import compiled_libraries as libraries
from phalanx.kernels.availability import CUTLASS_DSL
from phalanx.kernels.limits import Refusal
from phalanx.kernels.sm90.exchange.peer_buffers import SLOTS
from phalanx.parallel.dispatcher.costs import NOTHING, GroupTopology, TransportCosts
from phalanx.parallel.dispatcher.exchange import exchange_of, reaches_peers
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows
from phalanx.parallel.dispatcher.overlap import ExpertOverlap
from phalanx.parallel.dispatcher.transfers import (
    Collect,
    Dispatch,
    LayerCall,
    Receive,
    SendSums,
    saving,
    sent_routing,
)
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Dispatcher, Rank, Received

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange

EXPOSED = 0.25  # exposed part of an overlapped exchange, as measured (docs/kernels/log.md)


class Symm(Dispatcher):
    """The transport `symm`; `parallel.dispatcher.base` states the contract.

    Args:
        context: arguments of the transport, with connections and a group on one node.
    """

    no_overlap = None
    bf16_only = True

    def __init__(self, context: DispatchContext) -> None:
        c = context
        assert c.connections is not None
        self._connections, self._group, self._plan = c.connections, c.group, c.plan
        self._local, self._options, self._passes = c.local, c.options, c.transport.passes
        self._waits, self._recipe = c.waits, c.recipe

    @classmethod
    def build(cls, context: DispatchContext) -> "Symm":
        return cls(context)

    @classmethod
    def refuse_here(cls, dtype: torch.dtype) -> Refusal:
        """Reason that this rank cannot push tokens of a dtype to others of its host, or None.

        `parallel.dispatcher.transport` gathers the answers of all ranks.
        """
        if not torch.cuda.is_available():
            return "needs CUDA"
        if torch.cuda.get_device_capability() != (9, 0):
            return "needs a Hopper GPU"
        if refusal := cls.refuse_dtype(dtype):
            return refusal
        if not libraries.installed() and find_spec("nvidia_cutlass_dsl") is None:
            return f"needs the compiler of its kernels: pip install '{CUTLASS_DSL}'"
        if not reaches_peers():
            return "the GPUs of a host cannot write to each other's memory"
        return None

    @classmethod
    def refuse(cls, ranks: Sequence[Rank]) -> Refusal:
        several = len({rank.host for rank in ranks}) > 1
        refusal = "the ranks of an expert-parallel group are on several hosts" if several else None
        return super().refuse(ranks) or refusal

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        """Costs of a token to, and a sum from, each rank with one of its experts.

        If rows come back unreduced, a buffer has all of a rank's tokens, though few come.
        """
        rows, single = reach.once_a_rank, reach.rows_back * reach.tokens
        several = reach.ranks > 1
        return TransportCosts(
            there=rows,
            back=rows,
            resent=NOTHING if reach.keep else rows,
            saved=reach.received if reach.keep else 0,
            buffers=SLOTS * reach.received + single * (reach.rows_back > 1) if several else 0,
            exposed=EXPOSED,
        )

    def send_tokens(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        fp8: FP8Rows | None = None,
    ) -> Any:
        """Push tokens; with `fp8` in its format, in which they may have come over a rail."""
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        if fp8 is None and self._recipe is not None:
            fp8 = FP8Rows(self._recipe)
        call = self._call(x_TD, topk_idx_TK.contiguous(), topk_prob_TK, fp8)
        return call, Dispatch.apply(x_TD, topk_prob_TK, call)

    def receive_tokens(self, sent: Any) -> Received:
        call, pushed_ND = sent
        rows_ND, idx_NK, prob_NK = Receive.apply(pushed_ND, call)
        plan = self._plan(idx_NK, prob_NK)
        fp8_inputs = None if call.fp8 is None else call.fp8.fp8_inputs
        if call.overlaps:
            return Received(rows_ND, plan, ExpertOverlap(call), fp8_inputs, route=call)
        rows: Any = rows_ND.detach() if fp8_inputs is None else fp8_inputs.tokens
        hooks = functools.partial(saving, rows, call)
        return Received(rows_ND, plan, fp8_inputs=fp8_inputs, route=call, saving=hooks)

    def send_sums(self, out_ND: Tensor, received: Received, *, alone: bool = True) -> Any:
        return SendSums.apply(out_ND, received.route, alone), alone

    def receive_sums(self, sent: Any, received: Received, addends: Sequence[Tensor] = ()) -> Tensor:
        pushed_ND, alone = sent
        return Collect.apply(pushed_ND, received.route, alone, *(a.contiguous() for a in addends))

    def _call(
        self, x_TD: Tensor, idx_TK: Tensor, prob_TK: Tensor, fp8: FP8Rows | None
    ) -> LayerCall:
        """State of a call."""
        exchange = self._passes.each(functools.partial(self._exchange, x_TD, idx_TK))
        sent = sent_routing(idx_TK, prob_TK, ranks=exchange().ranks, local=self._local)
        kwargs = self._call_options(x_TD, fp8)
        return LayerCall(exchange, idx_TK, sent, local=self._local, **kwargs)

    def _exchange(self, x_TD: Tensor, idx_TK: Tensor, kind: str = "") -> "Exchange":
        """The exchange of the group for tokens of this shape, and for a kind of pass."""
        (T, D), K = x_TD.shape, idx_TK.shape[1]
        return exchange_of(self._connections, self._group, T, D, K, self._options, kind)

    def _call_options(self, x_TD: Tensor, fp8: FP8Rows | None) -> dict[str, Any]:
        """Arguments of `LayerCall` that a subclass shares."""
        overlaps = self._options.in_waves and self._waits
        return dict(hidden=x_TD.shape[1], overlaps=overlaps, keep=self._options.keep, fp8=fp8)
