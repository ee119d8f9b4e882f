"""Sizes of parallel groups on a number of ranks, and sets of `run.recompute` and `run.offload`."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.knobs import Changes, changed
from phalanx.configs.memory import memory_problems
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.cost.stages import stage_memory
from phalanx.moe.plan.cost.step_time import step_time

_MOST_TENSOR, _MOST_CONTEXT, _MOST_CHUNKS, _MOST_MICRO_BATCH = 8, 8, 8, 4
_MOST_EXPERT_NODES = 8  # nodes of an expert-parallel group
_TOKENS = 32768  # of a sequence on a rank, which is seldom fewer where that takes many ranks


class Layout(NamedTuple):
    """One layout; `changes` are the overrides that make it."""

    tensor: int
    context: int
    pipeline: int
    chunks: int  # model chunks of a stage
    expert: int
    micro_batch: int
    overlap: str = ""  # whether exchanges overlap another micro-batch: `on`, `off`, as it is set

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
            changes["parallel.overlap_microbatches"] = self.overlap
        return changes


def layouts(cfg: Config, world: int, node_gpus: int) -> Iterator[Layout]:
    """Every layout in powers of two whose sizes divide the ranks; not all are valid.

    `parallel.dispatch` of `cfg` counts if it is not `auto`.
    """
    e, batch = cfg.model.moe, cfg.data.global_batch
    most_context = max(_MOST_CONTEXT, cfg.data.sequence_length // _TOKENS)
    for tensor in _powers(math.gcd(world, min(_MOST_TENSOR, node_gpus))):
        for context in _powers(math.gcd(world // tensor, most_context)):
            for pipeline in _powers(world // (tensor * context)):
                if pipeline > cfg.model.layers:
                    break
                each = batch // (world // (tensor * context * pipeline))
                most = math.gcd(max(1, each), _MOST_MICRO_BATCH)
                group = math.gcd(e.experts, world // pipeline) if has_experts(cfg.model) else 1
                sizes = _powers(min(group, _MOST_EXPERT_NODES * node_gpus))
                overlaps = context == 1 and cfg.parallel.overlap_microbatches == "auto"
                for chunks in _powers(_MOST_CHUNKS if pipeline > 1 else 1):
                    if pipeline * chunks > cfg.model.layers:
                        break
                    for expert in sizes:
                        for micro in {*_powers(most), cfg.data.micro_batch}:
                            sizes_ = (tensor, context, pipeline, chunks, expert, micro)
                            between_nodes = overlaps and expert > node_gpus
                            for overlap in ("on", "off") if between_nodes else ("",):
                                yield Layout(*sizes_, overlap)


def neighbours(own: Layout) -> Iterator[Layout]:
    """Layouts with one size doubled or halved."""
    for name in ("tensor", "context", "pipeline", "chunks", "expert", "micro_batch"):
        size = getattr(own, name)
        for other in (2 * size, size // 2):
            if other:
                yield own._replace(**{name: other})


ALONE: Changes = {"parallel.dispatch": "auto", "precision.dispatch": "auto"}  # valid in any layout


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if most % 2**n == 0]


_RECOMPUTED: tuple[list[str], ...] = (
    [],
    ["norm"],
    ["norm", "mlp"],
    ["norm", "mla_up"],
    ["norm", "mla_up", "mlp"],
    ["norm", "mla_up", "mlp", "expert_h"],
    ["norm", "mla_up", "mlp", "attention", "expert_h"],
    ["norm", "mla_up", "mlp", "moe"],
    ["full"],
)
_OFFLOADED: tuple[list[str], ...] = (
    [],
    ["expert_h"],
    ["residual"],
    ["attention"],
    ["residual", "expert_h"],
    ["residual", "attention", "expert_h"],
)

_EACH = 0.002
"""Part of a step by which one more name must be faster: estimates see no difference below."""


class MemorySet(NamedTuple):
    """Values of `run.recompute` and `run.offload`."""

    changes: Changes  # its two knobs
    relative: float  # time of a step over that with the fastest set


def memory_sets(cfg: Config, world: int, machine: Machine) -> list[MemorySet]:
    """Sets that a model allows, each with less memory than all that are faster.

    Times and bytes are those of one layout, best of one stage, which is quick; others have the same
    order, nearly. Kernels of `cfg` are resolved (`moe.plan.described`).
    """
    names = {name for names in _RECOMPUTED for name in names}
    valid = {n for n in names if not list(memory_problems(changed(cfg, _set([n], []))))}
    found = list[tuple[float, int, Changes]]()
    for recompute, offload in product(_RECOMPUTED, _OFFLOADED):
        some = [name for name in recompute if name in valid]
        chosen = _set(some, offload)
        trial = changed(cfg, chosen)
        if (chosen in [x for *_, x in found]) or list(memory_problems(trial)):
            continue
        saved = max(m.saved + m.backward for m in stage_memory(trial, world))
        number = len(some) + len(offload)
        seconds = step_time(trial, world, machine).total * (1 + _EACH * number)
        found.append((seconds, saved, chosen))
    found.sort(key=lambda each: each[:2])
    least, sets = math.inf, list[MemorySet]()
    for seconds, saved, chosen in found:
        if saved < least:
            least = saved
            sets.append(MemorySet(chosen, seconds / found[0][0]))
    return sets


def _set(recompute: list[str], offload: list[str]) -> Changes:
    return {"run.recompute": recompute, "run.offload": offload}
