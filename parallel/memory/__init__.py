"""Activations between a layer's forward and backward pass: saved, recomputed, or in host memory.

`recompute` and `offload` are the two ways to free them; `layer_context` is what a layer and its
modules talk to. Memory is freed by emptying storages, as Megatron-Core's CheckpointWithoutOutput
does, so that it does not matter who has saved a tensor, as what. Megatron-Core's own asks the host
for random states, which cannot be captured in a CUDA graph, and compiles a C++ extension at its
first backward pass; nothing here is random.
"""
