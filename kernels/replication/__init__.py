"""What moves between ranks for expert replication: rows by themselves, weights, gradients."""
