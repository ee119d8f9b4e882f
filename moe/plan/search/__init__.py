"""`run.dry_run=search`: layouts of a run over its ranks, the fastest that fit.

`layouts` and memory sets are candidates, `best` orders and estimates them as a dry run does, and
`page` prints the best with their commands.
"""
