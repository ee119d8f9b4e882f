"""Runs in a browser, while they train: `scripts/watch.py`."""
