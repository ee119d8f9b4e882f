"""Latent experts: tokens are projected to fewer channels before they are sent to their experts.

    hidden -> route -> down -> dispatch -> experts -> combine -> up -> + shared + residual

LatentMoE of Nemotron 3 (arXiv 2512.20856). Dispatch, experts and combine have L channels in place
of D, so that bytes and FLOPs of an expert shrink by D / L, which pays for more experts and more of
them per token. The router and shared experts read the full hidden states. Projections stay in bf16
whatever the recipe of the run, and have no biases.

Legend: T tokens, D hidden, L latent channels, K experts per token.
"""

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.profiler import record_function

from phalanx.moe.layer import Halves, MoE
from phalanx.parallel.memory.layer_context import LayerContext


class LatentMoE(MoE):
    """`moe.layer.MoE` whose experts have `config.moe_latent_size` channels.

    Args: those of MoE. Parameters beside them: latent_in_proj.weight [L, D] and
    latent_out_proj.weight [D, L].
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, latent = self.config, self.config.moe_latent_size
        how: Any = dict(config=config, bias=False, tp_group=self.tp_group)
        self.latent_in_proj = ColumnParallelLinear(
            config.hidden_size, latent, init_method=config.init_method, **how
        )
        self.latent_out_proj = RowParallelLinear(
            latent,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **how,
        )

    def _through_experts(
        self,
        x_TD: Tensor,
        routed: tuple[Tensor, Tensor],
        shared: Halves,
        residual_TD: Tensor | None,
        memory: LayerContext,
    ) -> Tensor:
        fc1, fc2 = shared
        held: list[Tensor | None] = []
        # The shared experts compute where those of the base would, and are added behind the
        # projection: nothing is added to the sums of L channels.
        later = None if fc2 is None else lambda: held.append(fc2())
        with record_function("moe/latent"):
            latent_TL, _ = self.latent_in_proj(x_TD)
        out_TL = super()._through_experts(latent_TL, routed, (fc1, later), None, memory)
        with record_function("moe/latent"):
            out_TD, _ = self.latent_out_proj(out_TL)
        for added_TD in (*held, residual_TD):
            out_TD = out_TD if added_TD is None else out_TD + added_TD
        return out_TD
