"""The MoE layer. Read this file first.

    hidden -> route -> dispatch -> experts -> combine -> + shared experts + residual

Route chooses K experts for every token. Dispatch sends tokens to the ranks that hold their experts.
The experts compute one row for every received token: the weighted sum over the experts of this
rank. Combine sends the rows back and adds those of a token, the shared experts' output and the
residual. The shared experts overlap the exchange: their first GEMM runs during dispatch, their
second during combine. No count is read by the host in the layer, so that it can be captured in a
CUDA graph.

Legend: s tokens of a sequence on this rank, B sequences, T = s * B, D hidden, K experts per token,
N tokens received.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.profiler import record_function

from phalanx.configs.schema import MoEConfig
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Fp8Block, Recipe
from phalanx.moe.experts import Experts
from phalanx.moe.router.router import Router
from phalanx.moe.shared_experts import SharedExperts
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.base import make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport_class import LoadCounts, Transport
from phalanx.parallel.memory.layer_context import INACTIVE, LayerContext
from phalanx.parallel.memory.recompute import checkpoint

type Halves = tuple[Callable[[], None] | None, Callable[[], Tensor | None] | None]
"""Halves of the shared experts, if there are any; the second returns what is added, or None."""


@dataclass(frozen=True)
class MoEOptions:
    """Options of every MoE layer of a model, next to Megatron-Core's config."""

    moe: MoEConfig  # experts and routing
    spec: MLPSpec  # kernels, activation and recipe of the routed experts
    transport: Transport  # transport of tokens to the experts, on which all ranks have agreed
    budget: Budget  # rows reserved for the experts of a rank, shared by all layers
    symm: SymmOptions = SymmOptions()  # noqa: RUF009
    """Options of the transport `symm`."""
    connections: Connections | None = None
    """Memory that this process shares with other ranks, which `symm` needs."""
    recompute: frozenset[str] = frozenset()
    """Names of `run.recompute`, for a layer in place of ours (`ExpertBackend.layer`)."""
    fp8_rows: bool = False  # tokens are sent in FP8 where the experts accept it
    load_counts: LoadCounts | None = None
    """Counts of the transports of any rank in the load statistics."""
    fp8_dense: bool = True
    """Shared experts, dense MLPs and projections use the recipe of the routed experts."""

    def with_recipe(self, recipe: Recipe | None, *, dense: bool) -> "MoEOptions":
        """A copy with a recipe, which linear layers beside the experts have if `dense`."""
        return replace(self, spec=replace(self.spec, recipe=recipe), fp8_dense=dense)

    @property
    def dense(self) -> MLPSpec:
        """Spec of the linear layers other than the routed experts."""
        spec = self.spec if self.fp8_dense else replace(self.spec, recipe=None)
        if spec.facts.dense:
            spec = replace(spec, backend=spec.facts.dense, channel_order=None)
        return spec


class MoE(MoELayer):
    """Mixture of experts in place of a dense MLP.

    A subclass of Megatron-Core's MoELayer, as recomputation and checkpoints of Megatron-Core
    require, but with its own steps. Layer specifications build it as `partial(MoE, options=...)`.

    Args:
        config: Megatron-Core's config of the model.
        pg_collection: process groups.
        is_mtp_layer: the layer belongs to multi-token prediction.
        name: name of the module, for Megatron-Core.
        options: routing, activation, backend, transport and budget.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        options: MoEOptions,
    ) -> None:
        # Skip MoELayer's constructor, which would build its own router, dispatcher and experts.
        super(MoELayer, self).__init__(
            config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer
        )
        moe, recipe = options.moe, options.spec.recipe
        self.tp_group = pg_collection.tp
        self.router = Router(
            config=config,
            options=moe.router,
            top_k=moe.top_k,
            pg_collection=pg_collection,
            is_mtp_layer=is_mtp_layer,
            backend=options.spec.backend,
        )
        if options.load_counts is not None:
            self.router.statistics.extend(options.load_counts)
        self.dispatcher = make_dispatcher(
            options.transport,
            group=pg_collection.ep,
            experts=moe.experts,
            slots=self.router.slots,
            budget=options.budget,
            backend=options.spec.backend,
            symm=options.symm,
            recipe=recipe if isinstance(recipe, Fp8Block) else None,
            fp8_rows=options.fp8_rows,
            connections=options.connections,
        )
        # If nothing is sent back, the last kernel of fused experts adds what combine would.
        self._combine_in_experts = (
            options.spec.facts.adds_in_combine and not self.dispatcher.sends_back
        )
        self.experts = Experts(config=config, spec=options.spec, pg_collection=pg_collection)
        if moe.shared_ffn:
            self.shared_experts = SharedExperts(
                config=config,
                pg_collection=pg_collection,
                gate=moe.shared_gate,
                name=name and f"{name}.shared_experts",
                spec=options.dense,
            )

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: None = None,
        residual: Tensor | None = None,
        memory: LayerContext = INACTIVE,
    ) -> tuple[Tensor, None]:
        """Output of the layer [s, B, D], and no bias: biases are added inside.

        Args:
            hidden_states: normalised hidden states [s, B, D].
            residual: added to the output, also [s, B, D].
            memory: context of the transformer layer.

        Raises:
            ValueError: a padding mask, or a resumed forward of Megatron-Core's partial graphs.
        """
        if intermediate_tensors is not None or padding_mask is not None:
            raise ValueError("the MoE layer takes hidden states only: pad with tokens, not a mask")
        if memory.recomputes("moe"):
            return checkpoint(self._forward, hidden_states, addend=residual), None
        return self._forward(hidden_states, residual, memory), None

    def _forward(
        self,
        hidden_SBD: Tensor,
        residual_SBD: Tensor | None = None,
        memory: LayerContext = INACTIVE,
    ) -> Tensor:
        """Output of the layer [s, B, D]: the four steps, one after the other."""
        # In front of the router: autograd adds gradients in the order of what is built.
        x_TD = hidden_SBD.flatten(0, 1)
        residual_TD = None if residual_SBD is None else residual_SBD.flatten(0, 1)
        shared: Halves = None, None
        if self.shared_experts is not None:
            shared = self.shared_experts.halves(hidden_SBD, memory)

        # 1. K experts and their weights for every token.
        with record_function("moe/route"):
            routed = self.router(hidden_SBD)
        return self._through_experts(x_TD, routed, shared, residual_TD, memory).view_as(hidden_SBD)

    def _through_experts(
        self,
        x_TD: Tensor,
        routed: tuple[Tensor, Tensor],
        shared: Halves,
        residual_TD: Tensor | None,
        memory: LayerContext,
    ) -> Tensor:
        """Sums [T, D] of the `routed` experts' outputs, of shared experts and the residual."""
        (topk_idx_TK, topk_prob_TK), (shared_fc1, shared_fc2) = routed, shared

        # 2. Tokens go to the ranks of their experts, and come as rows in the order of experts.
        with record_function("moe/dispatch"):
            sent = self.dispatcher.send_tokens(x_TD, topk_idx_TK, topk_prob_TK)
            if shared_fc1 is not None and self.dispatcher.splits_shared_experts:
                shared_fc1()  # while tokens are in flight
            received = self.dispatcher.receive_tokens(sent)
            del sent  # it may hold rows that nobody else needs
        if received.statistics is not None and self.training and torch.is_grad_enabled():
            self.router.statistics.note(received.statistics)

        # 3. The weighted sum of this rank's experts for every received token. The fused experts add
        # shared experts and residual as well, if there is nothing to combine.
        added = _addends(shared_fc2, residual_TD) if self._combine_in_experts else ()
        with record_function("moe/experts"):
            out_ND = self.experts(received, added, memory)
        if self._combine_in_experts:
            return out_ND

        # 4. Rows go back, and those of a token are added, with shared experts and residual.
        with record_function("moe/combine"):
            sums = self.dispatcher.send_sums(out_ND, received, alone=shared_fc2 is None)
            # The shared experts, or the rest of them, compute while sums are in flight.
            added = _addends(shared_fc2, residual_TD)
            return self.dispatcher.receive_sums(sums, received, added)


def _addends(
    shared_fn: Callable[[], Tensor | None] | None, residual_TD: Tensor | None
) -> tuple[Tensor, ...]:
    """Output of the shared experts, and the residual, where there are any."""
    shared_TD = None if shared_fn is None else shared_fn()
    return tuple(addend for addend in (shared_TD, residual_TD) if addend is not None)
