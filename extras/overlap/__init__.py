"""Schedule of a step in which passes of two micro-batches run beside each other."""
