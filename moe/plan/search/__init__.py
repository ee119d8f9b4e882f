"""`run.dry_run=search`: layouts of a run over its ranks, the fastest that fit.

`layouts` lists sizes of parallel groups, `ranking` orders them by a quick estimate, `memory_sets`
lists what can be recomputed or offloaded, `best` estimates them as a dry run does, and `page`
prints the best with their commands. `nearby` has the best override one step from a run.
"""
