"""Parts of `scripts/lab/compare_throughput.py`, from its command line to the rows that it shows."""
