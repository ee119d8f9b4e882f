"""Grouped GEMMs for Hopper (sm_90a) in CuTe DSL: bf16 in, fp32 accumulation, sizes on the device.

`schedule` hands out tiles, `mainloop` multiplies, `epilogue` stores, `rows` joins them into a
kernel and `launch` compiles and calls it with torch tensors. Importing this package imports
nothing of CuTe DSL; the modules do.
"""
