"""Grouped GEMMs over the living blocks of experts' weights, on Hopper."""
