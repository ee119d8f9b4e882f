"""Fused MoE kernels for Hopper (sm_90a) in CuTe DSL: bf16, fp32 accumulation, sizes on the device.

`rows`, `fc1_act` and `fc2_dgrad_dact` are one grouped GEMM, `gemm`: `schedule` hands out tiles,
`mainloop` multiplies them, `epilogues` stores them through `staging`. `wgrad` has a loop of its
own. `launch` compiles, caches and calls kernels with torch tensors; `backend` puts them under
`kernels.expert_mlp.grouped_mlp`. Importing this package imports nothing of CuTe DSL; the modules
do.
"""
