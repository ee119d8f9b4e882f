"""Expert kernels for Blackwell (sm_100) through nvidia-cudnn-frontend's fused grouped GEMMs.

`backend` is the adapter. `library` calls cuDNN, `glu` maps activations to its epilogues,
`interleave` has its order of fc1's channels, `operands` its rows and formats and `availability` its
supported sizes. Importing this package does not import cuDNN; the first call of a GEMM does.
"""
