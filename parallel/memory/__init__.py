"""What becomes of activations between a layer's forward and its backward pass: kept, computed
again, or moved to host memory.

`again` computes again, `offload` moves, `layer_pass` is what a layer and its modules tell both.
Memory is given back by emptying storages, as Megatron-Core's CheckpointWithoutOutput does, so that
it does not matter who has saved a tensor, as what. Megatron-Core's own asks the host for random
states, which cannot be captured in a CUDA graph, and compiles a C++ extension at its first backward
pass; nothing here is random.
"""
