"""How ranks work together: process groups, token transport, budgets, schedules, checkpoints.

Nothing here knows the model (moe/) or the composed configuration (hydra).
"""
