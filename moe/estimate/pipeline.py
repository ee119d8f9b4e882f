"""Which micro-batches a pipeline stage holds at once, and how long it waits.

The schedules are Megatron-Core's: one forward, one backward (arXiv 2104.04473), over model chunks
in turn where there are several.
"""

from collections.abc import Sequence

from configs.layout import micro_batches
from configs.schema import Config


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


def bubble(cfg: Config, world: int) -> float:
    """Time that a stage waits, over the time that it works."""
    p = cfg.parallel
    return (p.pipeline - 1) / (micro_batches(cfg, world) * p.virtual_pipeline)


def _chunk(pass_: int, stages: int, chunks: int) -> int:
    """Chunk of a stage's `pass_`-th forward: groups of as many micro-batches as stages in turn."""
    return pass_ // stages % chunks
