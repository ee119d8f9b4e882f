"""What moves between ranks for clones of hot experts: rows by themselves, weights, gradients."""
