"""Parts of `scripts/bench_libraries.py`: generators of rows from a `Bench` and sizes."""
