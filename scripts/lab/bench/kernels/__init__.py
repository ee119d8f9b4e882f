"""Suites of `scripts/lab/bench_kernels.py`: functions from a `Bench` and a shape to records."""
