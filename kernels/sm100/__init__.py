"""Expert kernels for Blackwell (sm_100) through nvidia-cudnn-frontend's fused grouped GEMMs.

`backend` is the adapter in bf16. `library` has the calls, `glu` what activations they have,
`interleave` the order of fc1's channels that they want, `padding` their rows and `limits` what they
refuse. Importing this package imports nothing of cuDNN; the first call of a GEMM does.
"""
