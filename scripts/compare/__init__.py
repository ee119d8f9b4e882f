"""Parts of `scripts/compare_throughput.py`.

`points` expands a command line, `launch` starts a run and reads what it left, `sweep` does all runs
and keeps what is done on disk, `results` makes a row of each point, `report` shows the rows.
"""
