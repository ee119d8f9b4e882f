"""What a run imports, as train.py imports it; processes are forked from one that has it."""

from phalanx.parallel.megatron.imports import importing_megatron

with importing_megatron():
    import phalanx.configs.load
    import phalanx.moe.training.trainer
    import phalanx.train

# What every run imports or looks for, only where it needs it.
with importing_megatron():
    import megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader
    import megatron.core.dist_checkpointing.strategies.filesystem_async
    import megatron.core.models.mimo.optimizer  # noqa: F401

    import phalanx.parallel.dispatcher.alltoall
phalanx.configs.load.load([])  # with Hydra's plugins
