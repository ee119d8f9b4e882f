"""Weight gradients of experts on Hopper: one kernel, of operands in bf16 or in FP8."""
