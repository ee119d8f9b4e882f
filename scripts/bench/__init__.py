"""Suites of `scripts/bench_kernels.py`.

`shapes` has the problems and the target ratios, `measure` the timed rounds, `records` the table and
the JSON. A suite is a function from a `Bench` and a shape to records.
"""
