"""A model over HTTP on this machine, for looking at a run."""
