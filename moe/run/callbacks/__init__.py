"""Work between the steps of a run."""
