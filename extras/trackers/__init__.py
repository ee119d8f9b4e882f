"""Services that get the numbers of a run, besides Weights & Biases and TensorBoard."""
