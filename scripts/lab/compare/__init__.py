"""Parts of `scripts/lab/compare_throughput.py`.

`points` expands a command line, `launch` starts a run and reads its results, `sweep` does all runs
and stores finished ones on disk, `results` computes a row per point, `report` shows the rows.
"""
