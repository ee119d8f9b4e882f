"""Framework of the benchmarks, and their suites by script.

`timing` times cases in interleaved rounds on a clock of `clocks`, `records` prints and stores the
results; `shapes` and `models` have problems and targets.
"""
