"""Imports of a run, for the server that test processes are forked from."""

from phalanx.parallel.megatron.imports import importing_megatron

with importing_megatron():
    import phalanx.configs.load
    import phalanx.moe.run.entry
    import phalanx.train

# Modules that every run imports lazily.
with importing_megatron():
    import megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader
    import megatron.core.dist_checkpointing.strategies.filesystem_async
    import megatron.core.dist_checkpointing.strategies.state_dict_saver
    import megatron.core.models.hybrid.hybrid_block
    import megatron.core.models.mimo.optimizer  # noqa: F401
    import torch._dynamo  # noqa: F401 - of the first optimizer, half a second

    import phalanx.kernels.expert_mlp.fp8
    import phalanx.kernels.expert_mlp.reference
    import phalanx.kernels.expert_mlp.torch_grouped
    import phalanx.kernels.rms_norm.torch_norm
    import phalanx.parallel.dispatcher.alltoall
    import phalanx.parallel.dispatcher.symm
phalanx.configs.load.load(["model=tiny", "data=synthetic"])  # with Hydra's plugins
