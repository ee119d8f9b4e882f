"""The MoE layer. Read this file first.

    hidden -> route -> dispatch -> experts -> combine -> + shared experts + residual

Route picks K experts for every token; dispatch brings tokens to the ranks that hold their experts;
the experts make one row of every received token, the weighted sum over those of this rank; combine
adds a token's rows up on its own rank, and with them the shared experts' and the residual. The
shared experts run while rows travel, one half on each way. Nothing here or below tells the host a
count, so the whole layer can be captured.

Legend: s tokens of a sequence on this rank, B sequences, T = s * B, D hidden, K experts per token,
N tokens received.
"""

from dataclasses import dataclass, replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.profiler import record_function

from phalanx.configs.schema import MoEConfig
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.moe.experts import Experts
from phalanx.moe.router.router import Router
from phalanx.moe.shared_experts import SharedExperts
from phalanx.parallel.dispatcher.base import make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.received import addends
from phalanx.parallel.dispatcher.transport_class import Transport
from phalanx.parallel.memory.again import checkpoint
from phalanx.parallel.memory.layer_pass import now


@dataclass(frozen=True)
class MoEOptions:
    """What every MoE layer of a model is built with, beside Megatron-Core's config."""

    moe: MoEConfig
    """Experts and routing."""
    spec: MLPSpec
    """How routed experts are computed."""
    transport: Transport
    """To the experts, as all ranks have agreed on it."""
    budget: Budget
    """Rows kept for the experts of a rank, shared by all layers."""
    symm: SymmOptions = SymmOptions()  # noqa: RUF009
    """Of the transport `symm`."""
    recompute: tuple[str, ...] = ()
    """What Megatron-Core's own layer computes again, by its names."""
    fp8_rows: bool = False
    """Tokens travel in FP8 where the experts take them so."""
    fp8_dense: bool = True
    """The recipe of routed experts is also that of shared experts, dense MLPs and projections."""

    @property
    def dense(self) -> MLPSpec:
        """How the linear layers beside the routed experts are computed."""
        spec = self.spec if self.fp8_dense else replace(self.spec, recipe=None)
        if spec.backend == "cudnn":  # its rows come in blocks of an expert
            spec = replace(spec, backend="torch", interleaved=False)
        return spec


class MoE(MoELayer):
    """Mixture of experts in place of a dense MLP.

    A Megatron-Core MoELayer by type, which its recomputation and checkpoints ask for, with steps of
    its own. Megatron-Core builds it as `partial(MoE, options=...)` from a layer specification.

    Args:
        config: Megatron-Core's config of the model.
        pg_collection: process groups.
        is_mtp_layer: the layer belongs to multi-token prediction.
        name: of the module, for Megatron-Core.
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
        # Past MoELayer's own constructor, which would build its router, dispatcher and experts.
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
        )
        # Where nothing is sent back, the fused experts' last kernel makes the sum of a token.
        self._adds = options.spec.backend == "fused" and not self.dispatcher.sends_back
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
    ) -> tuple[Tensor, None]:
        """Hidden states [s, B, D] to [s, B, D]; biases are inside, so the second result is None.

        Args:
            hidden_states: normalised.
            residual: to be added, also [s, B, D].

        Raises:
            ValueError: a padding mask, or a resumed forward of Megatron-Core's partial graphs.
        """
        if intermediate_tensors is not None or padding_mask is not None:
            raise ValueError("the MoE layer takes hidden states only: pad with tokens, not a mask")
        if now().again("moe"):
            return checkpoint(self._forward, hidden_states, addend=residual), None
        return self._forward(hidden_states, residual), None

    def _forward(self, hidden_SBD: Tensor, residual_SBD: Tensor | None = None) -> Tensor:
        x_TD = hidden_SBD.flatten(0, 1)
        residual_TD = None if residual_SBD is None else residual_SBD.flatten(0, 1)
        with record_function("moe/route"):
            topk_idx_TK, topk_prob_TK = self.router(hidden_SBD)
        shared = self.shared_experts
        first, second = (None, None) if shared is None else shared.halves(hidden_SBD)
        with record_function("moe/dispatch"):
            received = self.dispatcher.dispatch(x_TD, topk_idx_TK, topk_prob_TK, first)
        if received.replication_plan is not None and self.training and torch.is_grad_enabled():
            self.router.statistics.add_replication_plan(received.replication_plan)
        if self._adds:
            more = addends(second, residual_TD)
            with record_function("moe/experts"):
                return self.experts(received, more).view_as(hidden_SBD)
        with record_function("moe/experts"):
            out_ND = self.experts(received)
        with record_function("moe/combine"):
            out_TD = self.dispatcher.combine(out_ND, received, second, residual_TD)
        return out_TD.view_as(hidden_SBD)
