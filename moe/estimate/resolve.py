"""The kernels and transport that `auto` takes on a Hopper GPU with all optional packages."""

import copy

from configs.layout import expert_parallel_size
from configs.schema import Config
from configs.validate import ConfigError
from kernels.registry import KernelUnavailable, resolve
from moe.facts import facts

_PACKAGES = frozenset({"transformer_engine", "triton", "nvidia_cutlass_dsl"})


def resolved(cfg: Config, world: int, node_gpus: int) -> Config:
    """A copy without `auto` in kernels and transport.

    Raises:
        ConfigError: a choice that no Hopper GPU can run.
    """
    cfg = copy.deepcopy(cfg)
    k = cfg.kernels
    expert = expert_parallel_size(cfg, world)
    known = facts(cfg, world, device="cuda", capability=(9, 0), packages=_PACKAGES, compiles=True)
    try:
        k.backend = resolve("grouped_mlp", k.backend, known).backend
        k.attention = resolve("attention", k.attention, known).backend
        k.norm = resolve("norm", k.norm, known).backend
    except KernelUnavailable as error:
        raise ConfigError(str(error)) from error
    if cfg.parallel.dispatch == "auto":
        bf16 = cfg.run.precision == "bf16"
        near = expert <= node_gpus and bf16  # neighbours in rank order
        cfg.parallel.dispatch = "local" if expert == 1 else "symm" if near else "alltoall"
    return cfg
