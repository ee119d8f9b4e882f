"""FP8 in blocks: the definition in plain torch, and the kernels that compute it."""
