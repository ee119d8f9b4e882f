"""Suites of `scripts/bench_kernels.py`: what is measured, how, and what becomes of the numbers.

`shapes` has the problems and what is asked of them, `measure` the rounds, `records` the table and
the JSON. A suite is a function from a `Bench` and a shape to records.
"""
