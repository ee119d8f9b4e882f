"""The experts in the models of torchtitan, by its overrides.

    torchrun -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b \
        --override.imports phalanx.adapters.torchtitan.experts

`experts` replaces the experts, GPT-OSS's too, which take rows that torchtitan's dispatcher has
sorted, on any mesh. `routed_experts` in its place also replaces the sorting of a rank that has all
experts, which then takes no copy of the rows.

Parameters are cast to bf16 in each call, as torchtitan does. The halves w1 and w3 are one parameter
w13, and checkpoints have them apart, under torchtitan's keys. Those of GPT-OSS stay torchtitan's.

Legend: E local experts, D model, F hidden, G gates and ups (2F), R rows sorted by expert, N rows or
tokens, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive, override
from torchtitan.distributed.parallel_dims import SpmdLayout
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward

from phalanx.kernels import api
from phalanx.kernels.api import Activation, SortedRows, TopK, resolve_backend

_W13, _W1, _W2, _W3 = "w13_E2FD", "w1_EFD", "w2_EDF", "w3_EFD"


class _Kernels:
    """The call of the kernels, for modules with `weights` and `options`."""

    weights: Callable[[], Any]
    options: Callable[[], Any]

    @property
    def resolved_backend(self) -> str:
        w1, w2, *_ = self.weights()
        return resolve_backend(w1, w1, w2, **self.options()).backend

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return self.compute(x_RD, SortedRows(num_tokens_per_expert_E))

    def compute(self, x_ND: Tensor, routing: SortedRows | TopK) -> Tensor:
        """Results in the dtype of x, computed in bf16."""
        return api.experts(x_ND.bfloat16(), routing, self.weights(), self.options()).type_as(x_ND)


class Experts(_Kernels, GroupedExperts):
    """SwiGLU experts: w13_E2FD [E, 2, F, D], gate and up, and w2_EDF [E, D, F]."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Sizes of torchtitan's experts, and the kernels."""

        backend: str = "auto"  # of `kernels.api.experts`

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        E, F, D = self.w1_EFD.shape
        del self.w1_EFD, self.w3_EFD
        self.w13_E2FD = nn.Parameter(torch.empty(E, 2, F, D))
        self.backend = config.backend
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_merge)

    def weights(self) -> tuple[Tensor, Tensor]:
        """w1 [E, 2F, D] and w2 [E, D, F] in bf16, the parts of this rank."""
        return _local(self.w13_E2FD).bfloat16().flatten(1, 2), _local(self.w2_EDF).bfloat16()

    def options(self) -> api.ExpertOptions:
        return {"backend": self.backend}


class GptOssExperts(_Kernels, GptOssGroupedExperts):
    """GPT-OSS's experts, with torchtitan's parameters, whose gates and ups alternate."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """Sizes of torchtitan's experts, and the kernels."""

        backend: str = "auto"  # of `kernels.api.experts`

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.backend = config.backend

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """w1 [E, G, D], w2 [E, D, F] and biases [E, G] and [E, D] in bf16, of this rank."""
        ranks = _tensor_ranks(self.mlp1_weight_EGD)
        w1, w2, b1 = (
            _local(w).bfloat16()
            for w in (self.mlp1_weight_EGD, self.mlp2_weight_EDF, self.mlp1_bias_EG)
        )
        # Ranks that share an expert each add a part of b2, and have its whole gradient.
        b2 = ScaleBiasForward.apply(_local(self.mlp2_bias_ED), ranks, torch.bfloat16)
        return w1, w2, b1, b2

    def options(self) -> api.ExpertOptions:
        activation = Activation("quick_geglu", limit=self.swiglu_limit, offset=1.0)
        return {"backend": self.backend, "activation": activation, "layout": "interleaved"}


class Routed(RoutedExperts):
    """Experts that read their tokens where they lie, and are summed in the same kernels."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """Sizes of torchtitan's experts, and its dispatcher."""

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        return self.inner_experts.compute(x_BLD, TopK(topk_expert_ids_BLK, topk_scores_BLK))


@override(target=GroupedExperts.Config, description="Experts of phalanx, fused.")
def experts(cfg: GroupedExperts.Config, *, backend: str = "auto") -> GroupedExperts.Config:
    """The config of the kernels' experts; other subclasses than GPT-OSS's stay torchtitan's."""
    if type(cfg) is GptOssGroupedExperts.Config:
        return derive(cfg, GptOssExperts.Config, backend=backend)
    if type(cfg) is not GroupedExperts.Config:
        return cfg
    made = derive(cfg, Experts.Config, backend=backend, param_init=_inits(cfg.param_init))
    if cfg.sharding_config is not None:
        layouts = dict(cfg.sharding_config.state_shardings)
        del layouts[_W3]
        layouts[_W13] = _with_halves(layouts.pop(_W1))
        made.sharding_config = replace(cfg.sharding_config, state_shardings=layouts)
    return made


@override(target=RoutedExperts.Config, exact=True, description="Routing to experts of phalanx.")
def routed_experts(cfg: RoutedExperts.Config, *, backend: str = "auto") -> RoutedExperts.Config:
    """The config of `Routed` where a rank has all experts, else of `experts` alone."""
    inner = experts(cfg.inner_experts, backend=backend)
    if inner is cfg.inner_experts:
        return cfg
    if type(cfg.token_dispatcher) is not LocalTokenDispatcher.Config:
        return replace(cfg, inner_experts=inner)
    return derive(cfg, Routed.Config, inner_experts=inner)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _tensor_ranks(weight: Tensor) -> int:
    """Ranks that have a part of each expert."""
    if not isinstance(weight, DTensor):
        return 1
    names = weight.device_mesh.mesh_dim_names or ()
    return weight.device_mesh.size(names.index("tp")) if "tp" in names else 1


def _inits(inits: dict[str, Callable[[Tensor], Any]] | None) -> dict[str, Any] | None:
    if inits is None or _W1 not in inits or _W3 not in inits:
        return inits
    gate, up = inits[_W1], inits[_W3]

    def halves(w13_E2FD: Tensor) -> None:
        gate(w13_E2FD[:, 0])
        up(w13_E2FD[:, 1])

    return {k: v for k, v in inits.items() if k not in (_W1, _W3)} | {_W13: halves}


def _with_halves(layout: SpmdLayout) -> SpmdLayout:
    """The layout of w13 as that of w1, whose axes after the experts' follow that of the halves."""
    axes = {
        axis: spmd.Shard(kind.dim + 1) if isinstance(kind, spmd.Shard) and kind.dim else kind
        for axis, kind in layout.axis_types.items()
    }
    return replace(layout, axis_types=axes)


def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    w13_E2FD = state.pop(prefix + _W13)
    state[prefix + _W1], state[prefix + _W3] = (w13_E2FD[:, i].contiguous() for i in (0, 1))


def _merge(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    halves = [state.pop(prefix + key, None) for key in (_W1, _W3)]
    if None not in halves:
        state[prefix + _W13] = torch.stack(halves, 1)
