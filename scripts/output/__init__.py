"""Output of the scripts: pictures, and printing to a pipe that may be closed early."""
