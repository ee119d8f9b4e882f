"""Activations between a layer's forward and backward pass: saved, recomputed, or in host memory.

`recompute` and `offload` free them; `layer_context` is what a layer and its modules talk to. Memory
is freed by emptying storages, as Megatron-Core's CheckpointWithoutOutput does, so that it does not
matter who has saved a tensor. That one asks the host for random states, which cannot be captured in
a CUDA graph, and compiles a C++ extension; nothing here is random.
"""
