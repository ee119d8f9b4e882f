"""Suites of `scripts/bench_dispatch.py`: records from a `Bench`, a layer and its tokens."""
