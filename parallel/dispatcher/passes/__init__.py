"""Exchanges of a forward and of a backward pass that are in flight at the same time."""
