"""Parts of a layer that can be recomputed or moved to host memory, by name.

They are values of `run.recompute` and `run.offload`; `moe.plan.cost` knows bytes and seconds of
each.
"""

RECOMPUTE: dict[str, str] = {
    "norm": "results of the norms in front of attention and MLP",
    "mla_up": "latent attention from its compressed vectors to queries, keys and values",
    "attention": "core attention",
    "mlp": "hidden activations of dense MLPs and shared experts",
    "expert_h": "input of the experts' activation, by their first product",
    "moe_act": "activation of Megatron-Core's experts; others always do",
    "moe": "MoE layers whole, exchanges included",
    "full": "layers whole",
}
"""Modules by name; `moe` and `full` contain others."""

OFFLOAD: dict[str, str] = {
    "residual": "inputs of the norms",
    "attention": "queries, keys, values and result of core attention",
    "expert_h": "input of the experts' activation",
}
"""Tensors by name."""

CONTAINS: dict[str, tuple[str, ...]] = {
    "moe": ("expert_h", "moe_act"),
    "full": tuple(name for name in RECOMPUTE if name != "full"),
}
"""Parts that recomputing `moe` or `full` recomputes as well."""
