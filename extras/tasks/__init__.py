"""Scores of tasks, while a model trains and of a checkpoint."""
