"""What a run would take, from its configuration alone: memory, traffic, time. No GPU, no groups.

`weights` and `activations` count bytes, `pipeline` says how many micro-batches a stage holds,
`memory` adds them up for every stage, `traffic` counts what experts send, `timing` divides by the
rates of a machine (configs/machines.py). The page that shows it is `moe.dry_run`.
"""
