"""Checkpoints: what is saved, how a save is committed, verified and loaded."""
