"""The training loop: checks, setup, steps, validation, bad steps, failures."""
