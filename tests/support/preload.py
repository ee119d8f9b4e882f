"""What a run imports, as train.py imports it; processes are forked from one that has it."""

from phalanx.parallel.megatron.imports import importing_megatron

with importing_megatron():
    import phalanx.configs.load
    import phalanx.moe.training.trainer
    import phalanx.train  # noqa: F401
