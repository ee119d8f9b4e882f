"""Sizes of the parallel groups that a model may have on a number of ranks."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.knobs import Changes
from phalanx.configs.schema import Config

_MOST_TENSOR, _MOST_CONTEXT, _MOST_CHUNKS, _MOST_MICRO_BATCH = 8, 8, 8, 4
_MOST_EXPERT_NODES = 8  # nodes of an expert-parallel group


class Layout(NamedTuple):
    """One layout; `changes` are the overrides that make it."""

    tensor: int
    context: int
    pipeline: int
    chunks: int  # model chunks of a stage
    expert: int
    micro_batch: int
    overlap: bool  # exchanges between nodes overlap another micro-batch

    def stagings(self, cfg: Config) -> list[Changes]:
        """Knobs with balanced stages, and with those of `cfg` if it lays out as many chunks."""
        p, balanced = cfg.parallel, self.changes()
        same = (self.pipeline, self.chunks) == (p.pipeline, p.virtual_pipeline)
        if not (same and p.pipeline_layout):
            return [balanced]
        return [balanced | {"parallel.pipeline_layout": p.pipeline_layout}, balanced]

    def changes(self) -> Changes:
        """Knobs of the layout, with balanced stages."""
        changes: Changes = {
            "parallel.tensor": self.tensor,
            "parallel.context": self.context,
            "parallel.pipeline": self.pipeline,
            "parallel.virtual_pipeline": self.chunks,
            "parallel.pipeline_layout": "",
            "parallel.expert": self.expert,
            "data.micro_batch": self.micro_batch,
        }
        if self.overlap:
            changes["parallel.overlap_microbatches"] = "on"
        return changes


def layouts(cfg: Config, world: int, node_gpus: int) -> Iterator[Layout]:
    """Every layout in powers of two whose sizes divide the ranks; not all are valid.

    Args:
        cfg: model, batch, and a transport if `parallel.dispatch` is not `auto`.
        world: ranks.
        node_gpus: ranks of a node.
    """
    e, batch = cfg.model.moe, cfg.data.global_batch
    for tensor in _powers(math.gcd(world, min(_MOST_TENSOR, node_gpus))):
        for context in _powers(math.gcd(world // tensor, _MOST_CONTEXT)):
            for pipeline in _powers(world // (tensor * context)):
                if pipeline > cfg.model.layers:
                    break
                each = batch // (world // (tensor * context * pipeline))
                most = math.gcd(max(1, each), _MOST_MICRO_BATCH)
                group = math.gcd(e.experts, world // pipeline) if has_experts(cfg.model) else 1
                sizes = _powers(min(group, _MOST_EXPERT_NODES * node_gpus))
                overlaps = tensor * context == 1 and cfg.parallel.overlap_microbatches == "auto"
                for chunks in _powers(_MOST_CHUNKS if pipeline > 1 else 1):
                    if pipeline * chunks > cfg.model.layers:
                        break
                    for expert in sizes:
                        for micro in {*_powers(most), cfg.data.micro_batch}:
                            sizes_ = (tensor, context, pipeline, chunks, expert, micro)
                            yield Layout(*sizes_, overlap=False)
                            if overlaps and expert > node_gpus:
                                yield Layout(*sizes_, overlap=True)


def neighbours(own: Layout) -> Iterator[Layout]:
    """Layouts with one size doubled or halved."""
    for name in ("tensor", "context", "pipeline", "chunks", "expert", "micro_batch"):
        size = getattr(own, name)
        for other in (2 * size, size // 2):
            if other:
                yield own._replace(**{name: other})


ALONE: Changes = {"parallel.dispatch": "auto", "precision.dispatch": "auto"}
"""Values that any layout may have."""


def _powers(most: int) -> list[int]:
    """Powers of two that divide `most`."""
    return [2**n for n in range(most.bit_length()) if most % 2**n == 0]
