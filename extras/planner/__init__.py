"""Pages of `run.dry_run`, which train nothing: what a run would take, and the best layouts of it.

`dry_run` is the page of one layout, with `advice`, the `certainty` of its speed and the `nearest`
records. `layouts` and memory sets are candidates of a search, `best` orders and estimates them as a
dry run does, and `search_page` prints the best with their commands. Costs are in `moe.plan.cost`.
"""
