"""What a run imports, as train.py imports it; processes are forked from one that has it."""

from phalanx.parallel.megatron.imports import importing_megatron

with importing_megatron():
    import phalanx.configs.load
    import phalanx.moe.training.trainer
    import phalanx.train  # noqa: F401

    # What is imported only where it is used, in every run.
    import megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader  # noqa: F401, I001
    import megatron.core.dist_checkpointing.strategies.filesystem_async  # noqa: F401
    import megatron.core.models.mimo.optimizer  # noqa: F401
    import phalanx.parallel.dispatch.alltoall  # noqa: F401

phalanx.configs.load.load([])  # Hydra looks for its plugins
