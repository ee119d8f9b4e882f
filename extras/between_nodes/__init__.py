"""Exchanges between the ranks with the same local rank on different nodes."""
