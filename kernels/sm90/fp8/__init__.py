"""Grouped GEMMs of operands in FP8, whose blocks of 128 have a scale each (`kernels.quantize`)."""
