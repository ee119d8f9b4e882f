"""Factors on initial weights, rates, decay and epsilon by kind of parameter; without torch.

m is the width over that of the base, f the width of experts over theirs. A matrix whose inputs are
r times as many as those of the base has r as its fan-in ratio. README.md derives the table.
"""

import math
from dataclasses import dataclass

from phalanx.configs.arithmetic.layers import of_variants
from phalanx.configs.schema import Config
from phalanx.configs.tables.optimizers import OPTIMIZERS

TABLE, VECTOR, HIDDEN, ROUTER, FINAL_NORM = "table", "vector", "hidden", "router", "final_norm"
EXPERT_FC1, EXPERT_FC2 = "expert_fc1", "expert_fc2"
SHARED_FC1, SHARED_FC2 = "shared_fc1", "shared_fc2"

_TABLES = ("word_embeddings", "output_layer")
_EXPERTS = ("experts", "local_experts")
_VECTORS = ("b1", "b2")  # biases of stacked experts, a row each
_FIRST = ("w1", "linear_fc1")
_PARTS = ("self_attention", "mlp", "eh_proj")


@dataclass(frozen=True)
class Scale:
    """Factors on what the configuration says."""

    initial: float = 1.0
    rate: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


def kind_of(name: str, dims: int) -> str:
    """Kind of a parameter by its dotted name in a model, wrapped or not, and its axes.

    Raises:
        ValueError: a matrix that has no rule.
    """
    path = name.split(".")
    if "final_layernorm" in path:
        return FINAL_NORM
    if dims == 1 or path[-1].startswith("bias") or path[-1] in _VECTORS:
        return VECTOR
    if set(path) & set(_TABLES):
        return TABLE
    if "router" in path or path[-1] == "gate_weight":  # of the router, or of shared experts
        return ROUTER
    first = bool(set(path) & set(_FIRST))
    if "shared_experts" in path:
        return SHARED_FC1 if first else SHARED_FC2
    if set(path) & set(_EXPERTS):
        return EXPERT_FC1 if first else EXPERT_FC2
    if set(path) & set(_PARTS):
        return HIDDEN
    raise ValueError(f"{name}: model.variants=mup has no rule for it; leave mup out")


def base(cfg: Config) -> dict[str, int]:
    """Width of the base as `mup`, and that of its experts as `mup_ffn` if it is given."""
    return {variant.name: variant.size for variant in of_variants(cfg.model)}


def ratios(cfg: Config) -> tuple[float, float]:
    """(m, f): this model's width, and that of its experts, over the base's."""
    given = base(cfg)
    m = cfg.model.hidden / given["mup"]
    return m, cfg.model.moe.ffn / given["mup_ffn"] if "mup_ffn" in given else m


def scales(cfg: Config) -> dict[str, Scale]:
    """Factors by kind of parameter."""
    m, f = ratios(cfg)
    moe, hidden = cfg.model.moe, cfg.model.hidden
    whole = OPTIMIZERS[cfg.optim.kind].whole_matrices

    def matrix(outputs: int, inputs: int, out_ratio: float, in_ratio: float) -> Scale:
        rate = 1 / in_ratio
        if whole:
            largest = max(outputs, inputs) / max(outputs / out_ratio, inputs / in_ratio)
            rate = math.sqrt(out_ratio / in_ratio / largest)
        return Scale(in_ratio**-0.5, rate, 1 / rate, 1 / m)

    return {
        TABLE: Scale(eps=1 / m),
        VECTOR: Scale(eps=1 / m),
        HIDDEN: matrix(hidden, hidden, m, m),
        EXPERT_FC1: matrix(moe.ffn, hidden, f, m),
        EXPERT_FC2: matrix(hidden, moe.ffn, m, f),
        SHARED_FC1: matrix(moe.shared_ffn or moe.ffn, hidden, f, m),
        SHARED_FC2: matrix(hidden, moe.shared_ffn or moe.ffn, m, f),
        ROUTER: Scale(1 / m, 1 / m, m),
        FINAL_NORM: Scale(1 / m, 1 / m),
    }
