"""Parts of `scripts/lab/bench_libraries.py`: generators of rows from a `Bench` and sizes."""
