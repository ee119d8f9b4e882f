"""Imports of a run, for the server that test processes are forked from."""

from phalanx.parallel.megatron.imports import importing_megatron

with importing_megatron():
    import phalanx.configs.load
    import phalanx.moe.training.entry
    import phalanx.train

# Modules that every run imports lazily.
with importing_megatron():
    import megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader
    import megatron.core.dist_checkpointing.strategies.filesystem_async
    import megatron.core.models.mimo.optimizer  # noqa: F401

    import phalanx.parallel.dispatcher.alltoall
phalanx.configs.load.load([])  # with Hydra's plugins
