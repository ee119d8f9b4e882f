"""Dense layers that a recipe of the run only emulates, for the start page."""

from collections.abc import Sequence

from torch import nn

from phalanx.configs.tables.backends import expert_backend
from phalanx.kernels.registry import Choice
from phalanx.moe.model.dense_mlp import DenseMLP
from phalanx.moe.shared_experts import SharedExperts
from phalanx.parallel.megatron.recipe_linear import computes_by


def emulated_layers(chunks: Sequence[nn.Module], backend: str) -> list[Choice]:
    """Line of the start page on dense layers whose widths the fused kernels do not support."""
    multiple = expert_backend(backend).dense_multiple
    if not multiple:
        return []
    shapes: dict[str, list[int]] = {}
    for chunk in chunks:
        for path, module in chunk.named_modules():
            spec, name = computes_by(module), path.rpartition(".")[2]
            if spec is not None and not spec.facts.dense_multiple:
                shapes[name] = list(module.weight.shape)
            if not isinstance(module, (DenseMLP, SharedExperts)):
                continue
            if not module.spec.facts.dense_multiple:
                shapes[name] = [module.linear_fc2.weight.shape[1]]
    if not shapes:
        return []
    widths = ", ".join(f"{name} ({' x '.join(map(str, n))})" for name, n in sorted(shapes.items()))
    reason = f"{widths}: the {backend} kernels take multiples of "
    reason += str(multiple)
    return [Choice("dense layers", "torch", f"emulated, which is slower: {reason}")]
