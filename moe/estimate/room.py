"""Memory that there is, of a host or a GPU, against what a run surely needs: before it is built.

Sure is what every implementation holds at once: parameters, gradients, the optimizer's state, and
the logits of a micro-batch. More than what is free of that is refused, as the kernel would kill the
run minutes later. What is expected, activations with it, is only warned of.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from phalanx.configs.formats import width
from phalanx.configs.knobs import listed, overrides, pluralize
from phalanx.configs.layout import (
    data_parallel_size,
    expert_parallel_size,
    pipeline_chunks,
    stage_ranks,
)
from phalanx.configs.linear_attention import linear_layers
from phalanx.configs.schema import Config
from phalanx.configs.validate import is_valid
from phalanx.kernels.refusal import Refusal
from phalanx.moe.estimate.accounting import parameters
from phalanx.moe.estimate.advice import Changes, enough, halves
from phalanx.moe.estimate.weights import stage_weights
from phalanx.moe.report.units import storage

_NEAR = 0.9
"""Of what is free: more than that is told."""


@dataclass(frozen=True)
class Room:
    """What some ranks may still take together."""

    where: str
    """`this host`, `GPU 0`."""
    free: int
    """Bytes that are available now."""
    swap: int = 0
    """Bytes on disk that could take their place, slowly."""


def host_room(root: Path = Path("/sys/fs/cgroup"), me: Path = Path("/proc/self/cgroup")) -> Room:
    """Of this host: what is available, or less where a cgroup of this process allows less.

    Args:
        root: where cgroups are mounted.
        me: file that names those of this process.
    """
    free, swap = psutil.virtual_memory().available, psutil.swap_memory().free
    where = "this host"
    for folder in _cgroups(root, me):
        if (left := _left(folder)) is not None and left < free:
            free, where = max(0, left), "this host's cgroup"
    return Room(where, free, swap)


def device_room(device: torch.device) -> Room:
    """Of a GPU: what its driver has, and what torch's allocator has kept unused."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Room(f"GPU {device.index or 0}", free + unused)


def sure_bytes(cfg: Config, world: int, ranks: Sequence[int]) -> int:
    """What some ranks of a run surely hold at once.

    Args:
        cfg: valid.
        world: ranks of the run.
        ranks: those that share a memory.
    """
    weights, each = stage_weights(cfg, world), stage_ranks(cfg, world)
    total = 0
    for rank in ranks:
        w = weights[rank // each]
        total += w.parameter_bytes + w.gradient_bytes + w.padding_bytes + w.optimizer_bytes
        total += logits_bytes(cfg) if rank // each == _last_stage(cfg) else 0
    return total


def refuse_here(cfg: Config, world: int) -> Refusal:
    """As `refuse`, before there are ranks, of a launch of all of them on this host.

    Args:
        cfg: valid.
        world: ranks; where LOCAL_WORLD_SIZE is set, only so many of them are on this host.
    """
    here = range(int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    if cfg.run.device == "cpu" or not torch.cuda.is_available():
        return refuse(cfg, world, here, host_room())
    for rank in here[: torch.cuda.device_count()]:
        if text := refuse(cfg, world, [rank], device_room(torch.device("cuda", rank))):
            return text
    return None


def refuse(cfg: Config, world: int, ranks: Sequence[int], room: Room) -> Refusal:
    """Why a run cannot be built here, and overrides that fit; None if it may fit.

    Args:
        cfg: valid, as given.
        world: ranks of the run.
        ranks: those that share `room`.
        room: measured before they allocate.
    """
    need = sure_bytes(cfg, world, ranks)
    most = room.free + room.swap
    if need <= most:
        return None
    who = pluralize(len(ranks), "rank") if len(ranks) > 1 else "a rank"
    fits = [text for text, _ in _remedies(cfg, world, ranks, most)]
    helps = listed(fits[:3] or [f"model={_small(cfg)}"])
    return (
        f"{cfg.model.name} does not fit: weights, gradients and optimizer of {who} take "
        f"{storage(need)} of {room.where}, where {storage(most)} are free; {_largest(cfg)}: set "
        f"{helps}{_more_ranks(cfg, world)}"
    )


def _more_ranks(cfg: Config, world: int) -> str:
    """How to see what more ranks take; empty if this layout is of no such number."""
    for ranks in (8 * world, 4 * world, 2 * world):
        if is_valid(cfg, ranks):
            number = overrides({"run.dry_run": True, "parallel.world_size": ranks})
            return f", or see what more ranks take with {number}"
    return ""


def near(what: str, expected: int, room: Room, helps: str) -> str:
    """A warning that `what` takes nearly all or more than there is, and what helps; or nothing."""
    if expected <= _NEAR * room.free:
        return ""
    return (
        f"{what} is expected to take {storage(expected)} of {room.where}, where "
        f"{storage(room.free)} are free: if it runs out of memory, {helps}"
    )


def pinned_bytes(cfg: Config, world: int, ranks: Sequence[int]) -> int:
    """Host memory that background checkpoints of some ranks on GPUs keep
    (parallel.checkpoint.host_buffer): their shares of a checkpoint, in which replicas divide what
    all of them hold."""
    weights, each = stage_weights(cfg, world), stage_ranks(cfg, world)
    replicas = data_parallel_size(cfg, world) * cfg.parallel.context
    copies, wide = each // expert_parallel_size(cfg, world), width(cfg)
    total = 0
    for w in (weights[rank // each] for rank in ranks):
        state = w.optimizer_bytes
        if not cfg.parallel.distributed_optimizer:
            state //= replicas
        total += state + wide * (w.dense // replicas + w.expert // copies)
    return total


def _remedies(cfg: Config, world: int, ranks: Sequence[int], most: int) -> list[tuple[str, int]]:
    """Overrides that fit, and what they need: of the run, or else of the size of the model."""

    def need(changed: Config, size: int) -> int:
        return sure_bytes(changed, size, ranks)

    m, p = cfg.model, cfg.parallel
    same_model: list[list[Changes]] = [
        [{"parallel.distributed_optimizer": True}],
        [{"parallel.grad_dtype": "bf16"}],
        [{"optim.moments": "bf16"}],
        [{"parallel.expert": n} for n in (2, 4, 8) if n > p.expert],
    ]
    fewer = [_halved("model.layers", m.layers), _halved("model.moe.experts", m.moe.experts)]
    for kinds in (same_model, [_halved("model.vocab_size", m.vocab_size)], fewer):
        found = [pair for pair in enough(cfg, world, need, most, kinds) if pair[1] <= most]
        if found:
            return found
    return []


def _small(cfg: Config) -> str:
    """The option of `model=` that has the same parts at the size of a CPU."""
    a = cfg.model.attention
    if linear_layers(cfg.model):
        return "tiny_qwen3_next"
    return "tiny_deepseek" if a.kind == "mla" else "tiny_gpt_oss" if a.sinks else "tiny"


def _halved(path: str, size: int) -> list[Changes]:
    return [{path: n} for n in halves(size)]


def _largest(cfg: Config) -> str:
    """Which size makes the model as large as it is."""
    m = cfg.model
    p = parameters(m)
    parts = {
        f"model.vocab_size={m.vocab_size}": p.embedding + p.head,
        f"model.layers={m.layers} of model.moe.experts={m.moe.experts}": p.routed_experts,
        f"model.hidden={m.hidden}": p.attention + p.dense_mlp + p.shared_experts,
    }
    what = max(parts, key=lambda name: parts[name])
    return f"most of it is {what}"


def logits_bytes(cfg: Config) -> int:
    """Bytes of a micro-batch's logits on a rank of the last stage."""
    p, d = cfg.parallel, cfg.data
    tokens = d.micro_batch * d.sequence_length // p.context
    return width(cfg) * tokens * cfg.model.vocab_size // p.tensor


def _last_stage(cfg: Config) -> int:
    chunks = pipeline_chunks(cfg)
    return next(i for i, letters in enumerate(chunks) if "L" in letters) % cfg.parallel.pipeline


def _cgroups(root: Path, me: Path) -> list[Path]:
    """Folders of the memory cgroups of this process, from the mount on."""
    try:
        lines = me.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "memory" if kinds else root
        parts = Path(path.lstrip("/"))
        found += [top, *(top / p for p in reversed(parts.parents)), top / parts]
    return list(dict.fromkeys(found))


def _left(folder: Path) -> int | None:
    """Bytes that a cgroup may still take, inactive page cache given back; None without limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (folder / limit).read_text(encoding="utf-8").strip()
            used = int((folder / usage).read_text(encoding="utf-8"))
            stat = (folder / "memory.stat").read_text(encoding="utf-8")
        except OSError:
            continue
        if not most.isdecimal():  # max
            return None
        told = dict(line.split(" ", 1) for line in stat.splitlines())
        return int(most) - used + int(told.get(cache, 0))
    return None
