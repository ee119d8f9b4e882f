"""Machines of `run.machine` besides those that were measured here: other GPUs, and YAML files."""
