"""Ops of the model that have more than one implementation, and the table that picks one.

Knows tensors, streams and integers only: no process groups, no model, no config. `kernels.registry`
chooses; `kernels.routing.plan`, `kernels.expert_mlp.grouped_mlp` and `kernels.attention` are what
the model calls, `kernels.expert_mlp.module` is for models without Megatron-Core;
`kernels.expert_mlp.reference` is what every implementation is tested against.
"""
