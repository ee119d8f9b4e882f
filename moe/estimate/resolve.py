"""The kernels and transport that `auto` takes on a Hopper GPU with all optional packages."""

import copy

import torch

from configs.layout import expert_parallel_size
from configs.schema import Config
from configs.validate import ConfigError
from kernels.registry import Facts, KernelUnavailable, resolve
from moe.router import slots

_PACKAGES = frozenset({"transformer_engine", "triton", "nvidia_cutlass_dsl"})


def resolved(cfg: Config, world: int, node_gpus: int) -> Config:
    """A copy without `auto` in kernels and transport.

    Raises:
        ConfigError: a choice that no Hopper GPU can run.
    """
    cfg = copy.deepcopy(cfg)
    a, e, k = cfg.model.attention, cfg.model.moe, cfg.kernels
    expert = expert_parallel_size(cfg, world)
    facts = Facts(
        device="cuda",
        capability=(9, 0),
        dtype=torch.bfloat16 if cfg.run.precision == "bf16" else torch.float32,
        hidden=cfg.model.hidden,
        ffn=e.ffn,
        experts=e.experts // expert,
        slots=slots(e.router, experts=e.experts, top_k=e.top_k).width,
        sinks=a.sinks,
        window=a.window,
        head_dim=a.head_dim if a.kind == "gqa" else a.qk_nope_dim + a.qk_rope_dim,
        v_dim=a.head_dim if a.kind == "gqa" else a.v_dim,
        context=cfg.parallel.context,
        packages=_PACKAGES,
        compiles=True,
    )
    try:
        k.backend = resolve("grouped_mlp", k.backend, facts).backend
        k.attention = resolve("attention", k.attention, facts).backend
        k.norm = resolve("norm", k.norm, facts).backend
    except KernelUnavailable as error:
        raise ConfigError(str(error)) from error
    if cfg.parallel.dispatch == "auto":
        bf16 = cfg.run.precision == "bf16"
        near = expert <= node_gpus and bf16  # neighbours in rank order
        cfg.parallel.dispatch = "local" if expert == 1 else "symm" if near else "alltoall"
    return cfg
