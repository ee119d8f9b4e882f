"""Exchanges between ranks for expert replication: unreduced rows, weights, gradients."""
