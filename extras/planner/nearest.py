"""Records of docs that are nearest to a run, for the page of a dry run."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.records import OwnRecord, Published, Record, configured, own, published
from phalanx.configs.schema import Config, ModelConfig

_SHOWN = 3


@dataclass(frozen=True)
class Match:
    """A record of the same model, sequence length and precision."""

    record: Record
    source: str  # address of a published one, file of an own one
    same_layout: bool  # on as many GPUs, with parallel groups of the same sizes
    same_kernels: bool  # measured here with the same kernels of experts


def lines(cfg: Config, world: int, gpu: str) -> Iterator[str]:
    """A line for each record that comes near."""
    for match in matching_records(cfg, world, gpu):
        yield _compared(match)


def matching_records(cfg: Config, world: int, gpu: str) -> list[Match]:
    """Records that come nearest: measured with the same kernels, then others, the fastest first.

    All of the same layout (at most three), whatever the GPU; without one the fastest of each kind,
    published and own, on GPUs of the kind `gpu` (`configs.tables.machines`) if there are any. If
    none of these was measured with the same kernels, the fastest that was is first.
    """
    found = [
        match
        for source, record in _everything()
        if record.model == cfg.model.name and (match := _match(cfg, world, record, source))
    ]
    found.sort(key=lambda m: (m.same_kernels, m.record.tokens_per_second_per_gpu), reverse=True)
    near = [m for m in found if gpu.startswith(m.record.hardware.split(" x ")[1])] or found
    kinds = (Published, OwnRecord)
    fastest = [m for kind in kinds for m in [m for m in near if isinstance(m.record, kind)][:1]]
    chosen = [m for m in found if m.same_layout] or fastest
    ours = [m for m in near if m.same_kernels][:1]
    if not any(m.same_kernels for m in chosen):
        chosen = ours + chosen
    return sorted(chosen, key=lambda m: not m.same_kernels)[:_SHOWN]


@functools.cache
def _everything() -> list[tuple[str, Record]]:
    theirs: list[tuple[str, Record]] = [(r.source, r) for r in published()]
    return theirs + [(f"docs/measured/training/{name}.yaml", r) for name, r in own().items()]


def _match(cfg: Config, world: int, record: Record, source: str) -> Match | None:
    other, ranks = configured(record)
    same = _model(other) == _model(cfg) and other.precision.recipe == cfg.precision.recipe
    if not same or other.data.sequence_length != cfg.data.sequence_length:
        return None
    # The system of an own record ends in the kernels that `auto` took.
    ours = isinstance(record, OwnRecord) and record.system.endswith(f" {cfg.kernels.backend}")
    return Match(record, source, _layout(other, ranks) == _layout(cfg, world), ours)


def _model(cfg: Config) -> ModelConfig:
    """Without forced or replayed choices, which a record tells apart."""
    router = replace(cfg.model.moe.router, force_balance=False, replay="")
    return replace(cfg.model, moe=replace(cfg.model.moe, router=router))


def _layout(cfg: Config, world: int) -> tuple[int, ...]:
    p = cfg.parallel
    expert = expert_parallel_size(cfg, world)
    return world, p.tensor, p.context, p.pipeline, p.virtual_pipeline, expert


def _compared(match: Match) -> str:
    """A line with a published or measured speed of a comparable run."""
    r, layout = match.record, "" if match.same_layout else ", another layout"
    return (
        f"{'published' if isinstance(r, Published) else 'measured'} "
        f"{r.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, {r.tflops_per_gpu:.0f} TFLOP/s/GPU: "
        f"{r.system} on {r.hardware}, {r.dtype}, {r.layout}, {r.routing} routing{layout} "
        f"({match.source})"
    )
