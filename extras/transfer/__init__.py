"""Learning rates and initial weights of one width, carried to models of other widths (muP)."""
