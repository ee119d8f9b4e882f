"""Which micro-batches a pipeline stage holds at once, and how long it waits.

The schedules are Megatron-Core's: one forward, one backward (arXiv 2104.04473), over model chunks
in turn where there are several.
"""

from collections.abc import Sequence
from itertools import accumulate

from phalanx.configs.layout import micro_batches
from phalanx.configs.schema import Config


def held(cfg: Config, world: int, stage: int, chunk_bytes: Sequence[int]) -> int:
    """Most bytes that a stage keeps for backward passes.

    Args:
        cfg: valid.
        world: ranks.
        stage: from 0.
        chunk_bytes: what one micro-batch keeps in each chunk of the stage.
    """
    p = cfg.parallel
    chunks = len(chunk_bytes)
    total = min(micro_batches(cfg, world), 3 * p.pipeline) * chunks  # then it repeats
    ahead = p.pipeline - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * p.pipeline
    ahead = min(ahead, total)
    now = most = 0
    for step in range(total + ahead):
        if step < total:
            now += chunk_bytes[_chunk(step, p.pipeline, chunks)]
            most = max(most, now)
        if step >= ahead:
            now -= chunk_bytes[chunks - 1 - _chunk(step - ahead, p.pipeline, chunks)]
    return most


def step_seconds(seconds: Sequence[float], micro_batches: int, chunks: int) -> float:
    """Least seconds of all micro-batches on all stages.

    A stage works on all of them, after the stages before it have made the forward pass of one model
    chunk and before they make its backward pass. With equal stages the last one waits longest:
    (stages - 1) / (micro-batches x chunks) of the work, as its schedule does (arXiv 2104.04473,
    section 2.2).

    Args:
        seconds: of a micro-batch, forward and backward, on all model chunks of each stage.
        micro_batches: of a step.
        chunks: of a stage.
    """
    before = accumulate(seconds, initial=0.0)
    return max(
        micro_batches * own + earlier / chunks
        for own, earlier in zip(seconds, before, strict=False)
    )


def _chunk(pass_: int, stages: int, chunks: int) -> int:
    """Chunk of a stage's `pass_`-th forward: groups of as many micro-batches as stages in turn."""
    return pass_ // stages % chunks
