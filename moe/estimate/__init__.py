"""Memory, traffic and step time of a run, from its configuration alone: no GPU, no process groups.

`weights` and `activations` count bytes, `pipeline` counts micro-batches in flight on a stage,
`memory` adds both up per stage, `traffic` counts the bytes of expert dispatch and `shards` those of
tensor and context ranks, `work` and `timing` divide by the rates of a machine
(configs/tables/machines.py), `advice` looks for overrides that fit. `moe.estimate.dry_run` prints
the page; `free_memory` compares a run with the memory of the current machine before anything is
built.
"""
