"""Free memory, compared with a run's minimum before anything is built.

Every implementation holds parameters, gradients, optimizer state and the logits of a micro-batch
at once. A run whose minimum exceeds the free memory is refused, since the operating system would
kill it minutes later. The expected peak, activations included, only causes a warning.
"""

import os
from collections.abc import Sequence

import torch

from phalanx.configs.arithmetic.accounting import parameters
from phalanx.configs.arithmetic.layers import mixer_layers
from phalanx.configs.formats import width
from phalanx.configs.knobs import Changes, listed, overrides, pluralize
from phalanx.configs.layout import (
    pipeline_chunks,
    replicas,
    stage_ranks,
)
from phalanx.configs.schema import Config
from phalanx.configs.tables.layers import MIXERS
from phalanx.configs.validate import is_valid
from phalanx.kernels.limits import Refusal
from phalanx.moe.plan.cost.weights import stage_weights
from phalanx.moe.plan.facts import FreeMemory, free_gpu_memory, free_host_memory
from phalanx.moe.plan.remedies import enough, halvings
from phalanx.moe.text import storage

_NEAR = 0.9  # fraction of free memory above which a run is warned


def minimum_bytes(cfg: Config, world: int, ranks: Sequence[int]) -> int:
    """Bytes that some ranks of a run, on the same device or host, hold at once at least."""
    weights, each = stage_weights(cfg, world), stage_ranks(cfg, world)
    total = 0
    for rank in ranks:
        total += weights[rank // each].device_bytes
        total += logits_bytes(cfg) if rank // each == _last_stage(cfg) else 0
    return total


def launch_refusal(cfg: Config, world: int) -> Refusal:
    """`memory_refusal` of a launch with all its ranks on this host, before they start.

    LOCAL_WORLD_SIZE of them are on this host if that is set.
    """
    local = range(int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    if cfg.run.device == "cpu" or not torch.cuda.is_available():
        return memory_refusal(cfg, world, local, free_host_memory())
    for rank in local[: torch.cuda.device_count()]:
        gpu = free_gpu_memory(torch.device("cuda", rank))
        if text := memory_refusal(cfg, world, [rank], gpu):
            return text
    return None


def memory_refusal(cfg: Config, world: int, ranks: Sequence[int], memory: FreeMemory) -> Refusal:
    """Why a run cannot be built here, and overrides that fit; None if it may fit.

    The `ranks` share the `memory`, which was measured before they allocate.
    """
    need = minimum_bytes(cfg, world, ranks)
    most = memory.free + memory.swap
    if need <= most:
        return None
    sharing = pluralize(len(ranks), "rank") if len(ranks) > 1 else "a rank"
    held = "weights, gradients, optimizer and logits"
    fits = _remedies(cfg, world, ranks, most)
    helps = listed(fits[:3] or [f"model={_small(cfg)}"])
    return (
        f"{cfg.model.name} does not fit: {held} of {sharing} take "
        f"{storage(need)} of {memory.device}, which has {storage(most)} free; "
        f"{_largest(cfg, logits=len(ranks) * logits_bytes(cfg) > need // 2)}: set "
        f"{helps}{_more_ranks(cfg, world)}"
    )


def _more_ranks(cfg: Config, world: int) -> str:
    """Advice to estimate the run with more ranks; empty if the layout allows no such number."""
    for ranks in (8 * world, 4 * world, 2 * world):
        if is_valid(cfg, ranks):
            number = overrides({"run.dry_run": True, "parallel.world_size": ranks})
            return f", or estimate more ranks with {number}"
    return ""


def nearly_full(subject: str, expected: int, memory: FreeMemory, helps: str) -> str:
    """Warning if `subject` is expected to take most of the free memory or more; else empty."""
    if expected <= _NEAR * memory.free:
        return ""
    return (
        f"{subject} is expected to take {storage(expected)} of {memory.device}, which has "
        f"{storage(memory.free)} free: if it runs out of memory, {helps}"
    )


def pinned_bytes(cfg: Config, world: int, ranks: Sequence[int]) -> int:
    """Pinned host memory that background checkpoints of some ranks on GPUs use.

    `parallel.checkpoint.writer` holds a rank's shard; replicas split what all of them hold.
    """
    weights, each = stage_weights(cfg, world), stage_ranks(cfg, world)
    (of_dense, of_experts), wide = replicas(cfg, world), width(cfg)
    total = 0
    for w in (weights[rank // each] for rank in ranks):
        state = w.optimizer_bytes
        if not cfg.parallel.distributed_optimizer:
            state //= of_dense
        total += state + wide * (w.dense // of_dense + w.expert // of_experts)
    return total


def _remedies(cfg: Config, world: int, ranks: Sequence[int], most: int) -> list[str]:
    """Overrides that fit: knobs of the run first, then the size of the model."""

    def need(changed: Config, size: int) -> int:
        return minimum_bytes(changed, size, ranks)

    m, p = cfg.model, cfg.parallel
    same_model: list[list[Changes]] = [
        [{"parallel.distributed_optimizer": True}],
        [{"parallel.grad_dtype": "bf16"}],
        [{"optim.moments": "bf16"}],
        [{"parallel.expert": n} for n in (2, 4, 8) if n > p.expert],
    ]
    d = cfg.data
    batch = [_halved("data.micro_batch", d.micro_batch)]
    batch.append(_halved("data.sequence_length", d.sequence_length))
    fewer = [_halved("model.layers", m.layers), _halved("model.moe.experts", m.moe.experts)]
    for kinds in (same_model, batch, [_halved("model.vocab_size", m.vocab_size)], fewer):
        pairs = enough(cfg, world, need, most, kinds)
        if fit := [overrides(changes) for changes, size in pairs if size <= most]:
            return fit
    return []


def _small(cfg: Config) -> str:
    """The option of `model=` with the same components that a CPU can train."""
    a = cfg.model.attention
    for name in mixer_layers(cfg.model):
        if MIXERS[name].tiny:
            return MIXERS[name].tiny
    return "tiny_deepseek" if a.kind == "mla" else "tiny_gpt_oss" if a.sinks else "tiny"


def _halved(path: str, size: int) -> list[Changes]:
    return [{path: n} for n in halvings(size)]


def _largest(cfg: Config, *, logits: bool) -> str:
    """The knob that contributes most parameters, or those of `logits`, in words."""
    m, d = cfg.model, cfg.data
    if logits:
        size = f"data.micro_batch={d.micro_batch} of data.sequence_length={d.sequence_length}"
        return f"most of it is logits of {size}"
    p = parameters(m)
    parts = {
        f"model.vocab_size={m.vocab_size}": p.embedding + p.head,
        f"model.layers={m.layers} of model.moe.experts={m.moe.experts}": p.routed_experts,
        f"model.hidden={m.hidden}": p.attention + p.dense_mlp + p.shared_experts,
    }
    return f"most of it is {max(parts, key=lambda name: parts[name])}"


def logits_bytes(cfg: Config) -> int:
    """Bytes of a micro-batch's logits on a rank of the last stage."""
    p, d = cfg.parallel, cfg.data
    tokens = d.micro_batch * d.sequence_length // p.context
    return width(cfg) * tokens * cfg.model.vocab_size // p.tensor


def _last_stage(cfg: Config) -> int:
    chunks = pipeline_chunks(cfg)
    return next(i for i, letters in enumerate(chunks) if "L" in letters) % cfg.parallel.pipeline
