"""Memory, traffic and time of a run, from its configuration alone."""
