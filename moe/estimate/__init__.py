"""What a run would take, from its configuration alone: memory, traffic, time. No GPU, no groups.

`weights` and `activations` count bytes, `pipeline` says how many micro-batches a stage holds,
`memory` adds them up for every stage, `traffic` counts what experts send and `heads` what linear
attention does, `timing` divides by the rates of a machine (configs/machines.py), `advice` looks for
overrides that fit. The page that shows it is `moe.estimate.dry_run`; `room` is what a run asks
before it is built, about the machine that it is on.
"""
