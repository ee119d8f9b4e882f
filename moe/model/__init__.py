"""The model around the MoE layer: attention, norms, losses, initial weights."""
