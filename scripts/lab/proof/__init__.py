"""Experiments of docs/proof: their list, runs one after the other, curves."""
