"""Ops of the model that have more than one implementation, and the table that picks one.

Knows tensors, streams and integers only: no process groups, no model, no config. `kernels.registry`
chooses; `kernels.plan`, `kernels.grouped_mlp` and `kernels.attention` are what the model calls,
`kernels.module` is for models without Megatron-Core; `kernels.reference` is what every
implementation is tested against.
"""
