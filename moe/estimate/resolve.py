"""The kernels and transport that `auto` takes on Hopper GPUs with all optional packages."""

import copy

from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError
from phalanx.kernels.registry import KernelUnavailable, resolve
from phalanx.moe.model.kernel_facts import facts

_PACKAGES = frozenset({"transformer_engine", "triton", "nvidia_cutlass_dsl"})


def resolved(cfg: Config, world: int, node_gpus: int) -> Config:
    """A copy without `auto` in kernels and transport.

    Raises:
        ConfigError: a choice that no Hopper GPU can run, or `hier` without several full nodes.
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
    # Experts' ranks are neighbours, and begin with a node.
    whole = expert > node_gpus > 1 and expert % node_gpus == 0
    if cfg.parallel.dispatch == "auto":
        near = expert <= node_gpus and cfg.run.precision == "bf16"
        among = "symm" if near else "hier" if whole else "alltoall"
        cfg.parallel.dispatch = "local" if expert == 1 else among
    if cfg.parallel.dispatch == "hier" and not whole:
        raise ConfigError(
            f"parallel.dispatch=hier needs several whole nodes of {node_gpus} GPUs, and "
            f"parallel.expert is {expert}: set parallel.dispatch=auto"
        )
    return cfg
