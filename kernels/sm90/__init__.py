"""Fused MoE kernels for Hopper (sm_90a) in CuTe DSL: bf16, fp32 accumulation, sizes on the device.

Those that do not multiply (plan, combine, topk, sums and pushes) are the same for Blackwell.

`gemm` is the grouped GEMM that most kernels of `experts` are made of; `routing` has the router and
the routing plan, `exchange` the pushes between GPUs. `jit` compiles, caches and launches kernels
with torch tensors. Importing this package imports nothing of CuTe DSL; the modules do.
"""
