"""Gains and costs of single options of a run."""
