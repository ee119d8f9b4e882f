"""RMSNorm, alone and with the addition of a residual, forward and backward."""
