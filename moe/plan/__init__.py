"""The plan of a run, and what it needs: memory, traffic and step time, without GPUs or processes.

`facts` describes ranks, and `resolve` makes the `Plan` from them and a configuration. `cost` counts
bytes and seconds by the rates of a machine (configs/tables/machines.py), `search` looks for
layouts, and `page` prints the dry run.
"""
