"""The kernels and transport that `auto` takes on Hopper GPUs with all optional packages."""

import copy

from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError
from phalanx.kernels.registry import KernelUnavailable, resolve
from phalanx.moe.model.kernel_facts import facts
from phalanx.parallel.dispatch.transport import class_of, planned

_PACKAGES = frozenset(
    {"flash_attn_4", "quack", "transformer_engine", "triton", "nvidia_cutlass_dsl"}
)


def resolved(cfg: Config, world: int, node_gpus: int) -> Config:
    """A copy without `auto` in kernels and transport.

    Raises:
        ConfigError: a choice that no Hopper GPU can run, or no group of so many ranks.
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
    cfg.run.device = "cuda"
    if k.backend == "megatron" and cfg.parallel.dispatch != "auto":  # which has its own
        return cfg
    refusals = {name: class_of(name).refuse_dtype(known.dtype) for name in TRANSPORTS}
    try:
        # Experts' ranks are neighbours, and begin with a node.
        taken = planned(
            cfg.parallel.dispatch,
            ranks=expert,
            node_ranks=node_gpus,
            refusals=refusals,
        )
    except ValueError as error:
        raise ConfigError(f"on nodes of {node_gpus} GPUs {error}") from error
    cfg.parallel.dispatch = taken.name
    return cfg
