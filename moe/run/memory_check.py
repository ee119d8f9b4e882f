"""Memory of hosts and GPUs: the check before the model is built, and advice when it is out."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from phalanx.configs.bounds import oversized
from phalanx.configs.formats import is_fp8, multiplies_fp8, resident_layers
from phalanx.configs.knobs import changed, get, listed, overrides, shown
from phalanx.configs.layout import (
    data_parallel_size,
    expert_parallel_size,
    largest_divisor,
    stage_ranks,
)
from phalanx.configs.schema import Config
from phalanx.configs.tables.optimizers import HOST_STATES, MOMENTS
from phalanx.configs.validate import ConfigError, is_valid
from phalanx.moe.plan.cost.stages import chooses_fp8_weights, host_needed, needed
from phalanx.moe.plan.facts import FreeMemory, JobFacts, RankFacts
from phalanx.moe.plan.memory_check import (
    logits_bytes,
    memory_refusal,
    nearly_full,
    pinned_bytes,
)
from phalanx.moe.plan.plan import Plan
from phalanx.parallel.fault.private_files import open_private

_ON_CPU = 4  # copies of the logits, in their bytes, that the loss on a CPU needs: two in fp32


def check_memory(cfg: Config, plan: Plan, facts: JobFacts) -> list[str]:
    """Warnings about a run that may not fit, the same on all ranks.

    The `cfg` is as the user set it. Raises ConfigError if the run surely does not fit on one rank,
    which is named.
    """
    if MOMENTS[cfg.optim.moments].hosted:
        resolve_name(HOST_STATES).check_hosts(cfg, facts)
    for rank in _tightest(cfg, facts):
        if text := memory_refusal(cfg, facts.world, _sharing(facts, rank), rank.memory):
            raise ConfigError(text if rank.rank == 0 else f"{text} (rank {rank.rank})")
    found: dict[int, str] = {}
    for rank in _tightest(cfg, facts):
        for place, text in enumerate(_warnings(cfg, plan, facts, rank)):
            if text:
                found.setdefault(place, text)
    return [found[place] for place in sorted(found)]


def _tightest(cfg: Config, facts: JobFacts) -> list[RankFacts]:
    """The ranks with the least memory: of each pipeline stage on GPUs, of each host on CPUs."""
    each, least = stage_ranks(cfg, facts.world), dict[int | str, RankFacts]()
    for rank in facts.ranks:
        key = rank.rank // each if facts.kind == "cuda" else rank.host
        if key not in least or rank.memory.free < least[key].memory.free:
            least[key] = rank
    return list(least.values())


def _sharing(facts: JobFacts, rank: RankFacts) -> list[int]:
    return [rank.rank] if facts.kind == "cuda" else facts.on_host(rank.rank)


def _warnings(cfg: Config, plan: Plan, facts: JobFacts, rank: RankFacts) -> Iterator[str]:
    known, world, copies = plan.cfg, facts.world, "precision.weights"
    if chooses_fp8_weights(changed(known, {copies: cfg.precision.weights})):
        known = changed(known, {copies: "scratch"})  # `auto` keeps copies in what is left
    ranks, expected = _sharing(facts, rank), needed(known, world)
    if facts.kind == "cpu":
        expected = len(ranks) * (expected + _ON_CPU * logits_bytes(cfg))
    remedies = advice(changed(cfg, {copies: known.precision.weights}), world)
    yield nearly_full(cfg.model.name, expected, rank.memory, remedies)
    if facts.kind == "cuda":
        local_ranks = facts.on_host(rank.rank)
        offloaded = len(local_ranks) * host_needed(known, world)
        left = replace(rank.host_memory, free=max(0, rank.host_memory.free - offloaded))
        yield _pinned(cfg, world, local_ranks, left)
        knob, without = f"run.offload={shown(cfg.run.offload)}", overrides({"run.offload": []})
        if MOMENTS[cfg.optim.moments].hosted:
            knob, without = f"optim.moments={cfg.optim.moments}", "parallel.world_size higher"
        yield nearly_full(knob, offloaded, rank.host_memory, f"set {without}")


def _pinned(cfg: Config, world: int, local_ranks: list[int], host: FreeMemory) -> str:
    if cfg.run.async_save == "off" or cfg.run.save_interval < 0:
        return ""
    size = pinned_bytes(cfg, world, local_ranks)
    return nearly_full("a background checkpoint", size, host, "set run.async_save=off")


_HOST = "DefaultCPUAllocator: can't allocate memory"


class OutOfMemory(torch.OutOfMemoryError):
    """Error whose message has the knobs that help, and their values."""


@contextmanager
def explain_out_of_memory(cfg: Config, world: int, folder: Path) -> Iterator[None]:
    """Raise OutOfMemory for torch's own errors, of a GPU or of the host.

    It has one line with the knobs that help at their current values. A snapshot of the allocator
    for pytorch.org/memory_viz is written to the run's `folder`.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _HOST not in str(error):
            raise
        reason = (str(error).splitlines() or ["no reason was reported"])[0]
        snapshot = _snapshot(folder / f"memory_rank{os.environ.get('RANK', '0')}.pickle")
        raise OutOfMemory(f"{advice(cfg, world)}{snapshot} ({reason})") from error


def advice(cfg: Config, world: int) -> str:
    """Overrides that each save memory, such as `set data.micro_batch=2 or ...`, cheapest first.

    If a size is impossible nothing else would help, and only that is named.
    """
    if impossible := oversized(cfg):
        return "; ".join(impossible)
    remedies = [
        (overrides(changes) for changes in remedy if is_valid(changed(cfg, changes), world))
        for remedy in _remedies(cfg, world)
    ]
    helpful = [text for remedy in remedies if (text := next(remedy, ""))]
    return f"set {listed(helpful)}" if helpful else "use more ranks or a smaller model"


def _remedies(cfg: Config, world: int) -> Iterator[list[dict[str, Any]]]:
    """Changes of knobs that save memory, for each remedy the smallest change first."""
    d, p, r = cfg.data, cfg.parallel, cfg.run
    copies = is_fp8(cfg) if cfg.kernels.backend == "auto" else multiplies_fp8(cfg)
    if copies and resident_layers(cfg)[0]:
        yield [{"precision.weights": "scratch"}]
    if p.delay_wgrad == "pairs" or (p.pipeline > 1 and p.delay_wgrad != "off"):
        yield [{"parallel.delay_wgrad": "off"}]
    if d.micro_batch > 1:
        yield [{"data.micro_batch": largest_divisor(d.micro_batch, d.micro_batch - 1)}]
    if r.recompute != ["full"]:
        # Activations that are recomputed cannot be offloaded.
        offload = [name for name in r.offload if name == "residual"]
        change = {} if offload == r.offload else {"run.offload": offload}
        yield [{"run.recompute": ["full"]} | change]
    if "residual" not in r.offload:
        yield [{"run.offload": ["residual", *r.offload]}]
    if not p.distributed_optimizer and data_parallel_size(cfg, world) > 1:
        yield [{"parallel.distributed_optimizer": True}]
    yield [{"parallel.expert": size} for size in _doubles(expert_parallel_size(cfg, world), world)]
    yield [{"parallel.tensor": size} for size in _doubles(p.tensor, world)]
    even = {"parallel.pipeline_layout": "", "parallel.virtual_pipeline": 1}
    even = {path: value for path, value in even.items() if get(cfg, path) != value}
    yield [{"parallel.pipeline": size} | even for size in _doubles(p.pipeline, world)]
    if d.sequence_length > 1:
        yield [{"data.sequence_length": d.sequence_length // 2}]


def _doubles(size: int, most: int) -> list[int]:
    return [size << n for n in range(1, most.bit_length()) if size << n <= most]


def _snapshot(path: Path) -> str:
    """Write a snapshot of the allocator; return a part of the message."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open_private(path, "wb").close()  # it has stacks in it; torch opens the file that is there
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f"; no memory snapshot: {error}"
    return f"; memory snapshot in {path}"
