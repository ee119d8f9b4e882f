"""Order of micro-batches on pipeline stages: which overlap, how many are in flight, the bubble.

The schedules are Megatron-Core's: one forward, one backward (arXiv 2104.04473), interleaved over
model chunks if there are several; or that of micro-batches that overlap, which has the same bubble.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from operator import sub
from pkgutil import resolve_name

from phalanx.configs.layout import micro_batches, not_overlappable
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.capabilities import OVERLAP
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError


def reason_in_turn(cfg: Config, world: int) -> str | None:
    """Reason, without an estimate, that micro-batches follow one another; None: one decides.

    The `cfg` has no `auto` in kernels, transport and device. Raises ConfigError if `on` is forced
    and cannot run.
    """
    wanted = cfg.parallel.overlap_microbatches
    if wanted == "off":
        return ""
    if reason := not_overlappable(cfg):
        if wanted == "on":
            knob = "parallel.overlap_microbatches"
            raise ConfigError(f"{knob}=on cannot run: {reason}; set {knob}=auto")
        return reason
    return _left_by_auto(cfg, world) if wanted == "auto" else None


def _left_by_auto(cfg: Config, world: int) -> str | None:
    """Reason for which `auto` leaves it, whatever the estimate says; None if there is none."""
    if cfg.run.device == "cpu":
        return "a CPU computes one pass at a time"
    if expert_backend(cfg.kernels.backend).host_counts:
        return f"{cfg.kernels.backend} experts have the host wait for each pass"
    facts = TRANSPORTS[cfg.parallel.dispatch]
    if facts.one_rank:
        return "all experts are on one rank, which exchanges nothing"
    if not facts.collective:
        return f"{cfg.parallel.dispatch} overlaps its exchanges with experts"
    if micro_batches(cfg, world) == 1:
        return "a step has one micro-batch"
    return None


def in_flight_bytes(cfg: Config, world: int, stage: int, chunk_bytes: Sequence[int]) -> int:
    """Peak bytes that a stage saves for backward passes, by the resolved schedule of micro-batches.

    `chunk_bytes` are what one micro-batch saves in each chunk of the stage, which counts from 0.
    """
    if not any(chunk_bytes):
        return 0
    p = cfg.parallel
    chunks = len(chunk_bytes)
    total = min(micro_batches(cfg, world), 3 * p.pipeline) * chunks  # the schedule repeats then
    ahead = p.pipeline - stage - 1
    if p.overlap_microbatches == "on":
        ahead = resolve_name(OVERLAP.ahead)(stage, p.pipeline, chunks)
    elif chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * p.pipeline
    ahead = min(ahead, total)
    if len({*chunk_bytes}) == 1:
        return chunk_bytes[0] * min(ahead + 1, total)
    # Chunks of the passes: `pipeline` micro-batches each, in turn; backward from the last one.
    turn = [size for size in chunk_bytes for _ in range(p.pipeline)]
    turns = -(-total // len(turn))
    saved = accumulate((turn * turns)[:total])
    freed = accumulate((turn[::-1] * turns)[:total], initial=0)
    return max(map(sub, saved, chain(repeat(0, ahead), freed)), default=0)


def step_seconds(
    seconds: Sequence[float],
    micro_batches: int,
    chunks: int,
    delayed: Sequence[float] | None = None,
    held: Sequence[int] | None = None,
) -> float:
    """Minimum seconds of all micro-batches on all stages.

    A stage starts when the stages before it have finished the forward pass of one model chunk, and
    ends before they run its backward pass. With equal stages the bubble of the last one is
    (stages - 1) / (micro-batches x chunks) of the work (arXiv 2104.04473, section 2.2). Weight
    gradients that wait are no part of that backward pass, and those of passes that are held longer
    are computed when there is nothing else to do (ZB-H1 of arXiv 2401.10241).

    Args:
        seconds: time of a micro-batch, forward and backward, on all model chunks of each stage.
        micro_batches: number per step.
        chunks: number per stage.
        delayed: part of `seconds` that is weight gradients that wait; None: nothing.
        held: number of backward passes of each stage whose weight gradients wait beyond a transfer.
    """
    delayed = [0.0] * len(seconds) if delayed is None else delayed
    held = [0] * len(seconds) if held is None else held
    before = accumulate((s - w for s, w in zip(seconds, delayed, strict=True)), initial=0.0)
    return max(
        micro_batches * stage + (earlier - passes * late) / chunks
        for stage, earlier, passes, late in zip(seconds, before, held, delayed, strict=False)
    )
