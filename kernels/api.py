"""The public interface of the kernels: experts, routers and the loss for models of any framework.

It imports torch alone. Names keep their meaning between minor versions; all others of
`phalanx.kernels` may change.
"""

from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import Margins
from phalanx.kernels.functional.choice import BackendChoice
from phalanx.kernels.functional.experts import (
    SortedRows,
    TopK,
    experts,
    grouped_experts,
    grouped_experts_sorted,
    resolve_backend,
)
from phalanx.kernels.functional.flops import register_flops
from phalanx.kernels.functional.layouts import LAYOUTS, WeightLayout, keep_converted
from phalanx.kernels.functional.linear_loss import linear_cross_entropy
from phalanx.kernels.functional.module import GroupedMLP
from phalanx.kernels.functional.moe import MoE
from phalanx.kernels.functional.options import ExpertOptions, KernelOptions
from phalanx.kernels.functional.router import RouterOptions, router_topk
from phalanx.kernels.quantize.recipe import Fp8Block, Microscaling
from phalanx.kernels.registry import KernelUnavailable

__all__ = [
    "ACTIVATIONS",
    "LAYOUTS",
    "Activation",
    "BackendChoice",
    "ExpertOptions",
    "Fp8Block",
    "GroupedMLP",
    "KernelOptions",
    "KernelUnavailable",
    "Margins",
    "Microscaling",
    "MoE",
    "RouterOptions",
    "SortedRows",
    "TopK",
    "WeightLayout",
    "experts",
    "grouped_experts",
    "grouped_experts_sorted",
    "keep_converted",
    "linear_cross_entropy",
    "register_flops",
    "resolve_backend",
    "router_topk",
]
