"""Products of Newton-Schulz iterations, whose results are symmetric."""
