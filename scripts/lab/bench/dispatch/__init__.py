"""Suites of `scripts/lab/bench_dispatch.py`: records from a `Bench`, a layer and its tokens."""
