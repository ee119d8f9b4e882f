"""Micro-batches in flight on a pipeline stage, and the pipeline bubble.

The schedules are Megatron-Core's: one forward, one backward (arXiv 2104.04473), interleaved over
model chunks if there are several; or that of micro-batches that overlap, which has the same bubble.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from operator import sub
from pkgutil import resolve_name

from phalanx.configs.layout import micro_batches
from phalanx.configs.schema import Config
from phalanx.configs.tables.capabilities import OVERLAP


def in_flight_bytes(cfg: Config, world: int, stage: int, chunk_bytes: Sequence[int]) -> int:
    """Peak bytes that a stage saves for backward passes.

    Args:
        cfg: valid, with resolved `parallel.overlap_microbatches`.
        world: ranks.
        stage: from 0.
        chunk_bytes: bytes that one micro-batch saves in each chunk of the stage.
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
    # Chunks of the passes: `pipeline` micro-batches each, in turn; backward from the last one.
    passes = [step // p.pipeline % chunks for step in range(total)]
    saved = accumulate(chunk_bytes[chunk] for chunk in passes)
    freed = accumulate((chunk_bytes[-1 - chunk] for chunk in passes), initial=0)
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
