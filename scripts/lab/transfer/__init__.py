"""Transfer of learning rates to other widths: the coordinate check."""
