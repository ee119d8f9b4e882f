"""Check of the memory of hosts and GPUs, before the model is built."""

from collections.abc import Iterator

from phalanx.configs.knobs import overrides, shown
from phalanx.configs.layout import stage_ranks
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError
from phalanx.moe.plan.cost.stages import chooses_fp8_weights, host_needed, with_fp8_weights
from phalanx.moe.plan.facts import JobFacts, RankFacts
from phalanx.moe.plan.free_memory import FreeMemory
from phalanx.moe.plan.page.advice import needed
from phalanx.moe.plan.page.memory_check import (
    logits_bytes,
    memory_refusal,
    nearly_full,
    pinned_bytes,
)
from phalanx.moe.plan.plan import Plan
from phalanx.moe.run.out_of_memory import advice

_ON_CPU = 4
"""Copies of the logits, in units of their bytes, that the loss on a CPU needs: two in fp32."""


def check_memory(cfg: Config, plan: Plan, facts: JobFacts) -> list[str]:
    """Warnings about a run that may not fit, the same on all ranks.

    Args:
        cfg: configuration as the user set it.
        plan: plan of the run.
        facts: facts of all ranks.

    Raises:
        ConfigError: the run surely does not fit on one rank, which is named.
    """
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
    """Ranks that share the memory of a rank."""
    return [rank.rank] if facts.kind == "cuda" else facts.on_host(rank.rank)


def _warnings(cfg: Config, plan: Plan, facts: JobFacts, rank: RankFacts) -> Iterator[str]:
    """Warnings about a rank and its host, each empty if there is nothing to warn about."""
    known, world = plan.cfg, facts.world
    if chooses_fp8_weights(with_fp8_weights(known, cfg.precision.weights)):
        known = with_fp8_weights(known, "scratch")  # `auto` keeps copies in what is left
    ranks, expected = _sharing(facts, rank), needed(known, world)
    if facts.kind == "cpu":
        expected = len(ranks) * (expected + _ON_CPU * logits_bytes(cfg))
    remedies = advice(with_fp8_weights(cfg, known.precision.weights), world)
    yield nearly_full(cfg.model.name, expected, rank.memory, remedies)
    if facts.kind == "cuda":
        local_ranks = facts.on_host(rank.rank)
        yield _pinned(cfg, world, local_ranks, rank.host_memory)
        offloaded = len(local_ranks) * host_needed(known, world)
        knob, without = f"run.offload={shown(cfg.run.offload)}", overrides({"run.offload": []})
        yield nearly_full(knob, offloaded, rank.host_memory, f"set {without}")


def _pinned(cfg: Config, world: int, local_ranks: list[int], host: FreeMemory) -> str:
    """Warning about background checkpoints, which a rank on a GPU copies to its host."""
    if cfg.run.async_save == "off" or cfg.run.save_interval < 0:
        return ""
    size = pinned_bytes(cfg, world, local_ranks)
    return nearly_full("a background checkpoint", size, host, "set run.async_save=off")
