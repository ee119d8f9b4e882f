"""Cost of Muon: the matrices that it orthogonalizes, their owners, and the matrix products.

A data parallel rank of the sharded optimizer owns complete parameters (extras.muon.matrices).
Megatron-Core assigns those of each gradient bucket in order of size, each to the least loaded rank,
and pads the buffers of all ranks to the largest; this module does the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.configs.arithmetic.layers import expert_hidden, mixer_of, of_variants
from phalanx.configs.layout import data_parallel_size, expert_parallel_size, optimizer_shards
from phalanx.configs.schema import Config, ModelConfig
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.moe.plan.cost.weights import Chunk, WholeUpdates

_BUCKET, _BUCKET_OF_RANK = 40_000_000, 1_000_000
"""Minimum elements of a bucket whose reduction overlaps, in total and per rank (Megatron-Core)."""
_BYTES = 36  # bytes read and written per element around the products: momentum, norm, rounding
_FULL = 0.9  # fraction of a bucket that Megatron-Core fills with parameters before it assigns them


class Stack(NamedTuple):
    """Matrices of one unsharded parameter: a number of one shape, and others of other shapes."""

    number: int
    rows: int
    columns: int
    expert: bool = False
    others: tuple[tuple[int, int, int], ...] = ()  # (number, rows, columns) of each other shape

    @property
    def elements(self) -> int:
        return sum(number * rows * columns for number, rows, columns in self._shapes())

    @property
    def flops(self) -> float:
        """FLOPs of one Newton-Schulz iteration: X X^T, its square, and their product with X."""
        total = 0.0
        for number, rows, columns in self._shapes():
            short, long = sorted((rows, columns))
            total += number * (4.0 * short**2 * long + 2.0 * short**3)
        return total

    def _shapes(self) -> tuple[tuple[int, int, int], ...]:
        return (self.number, self.rows, self.columns), *self.others


class Share(NamedTuple):
    """Matrices of the most loaded rank."""

    elements: int
    flops: float  # FLOPs of one Newton-Schulz iteration
    padding: int  # elements of the buffers that belong to no parameter


def whole_updates(cfg: Config, world: int, chunks: Sequence[Chunk]) -> WholeUpdates:
    """Matrices of a stage of these model chunks, and the share of its most loaded rank."""
    held = [stack for chunk in chunks for stack in _stacks(cfg, world, chunk)]
    share = _largest_share(cfg, world, held)
    return WholeUpdates(
        dense=sum(s.elements for s in held if not s.expert) // cfg.parallel.tensor,
        expert=sum(s.elements for s in held if s.expert),
        elements=share.elements,
        padding=share.padding,
        flops=cfg.optim.ns_steps * share.flops,
        touched=_BYTES * share.elements,
    )


def _stacks(cfg: Config, world: int, chunk: Chunk) -> list[Stack]:
    m, e, up = cfg.model, cfg.model.moe, ACTIVATIONS[cfg.model.moe.activation].halves
    h = m.hidden
    mlp = [Stack(up, m.dense_ffn, h), Stack(1, h, m.dense_ffn)]
    shared = [Stack(up, e.shared_ffn, h), Stack(1, h, e.shared_ffn)] if e.shared_ffn else []
    local = e.experts // expert_parallel_size(cfg, world)
    inner = expert_hidden(m)
    routed = [Stack(up * local, e.ffn, inner, True), Stack(local, inner, e.ffn, True)]
    changed = [Stack(1, *shape) for v in of_variants(m) for shape in v.matrices(m)]
    return [
        *(s for name, n in sorted(chunk.mixers.items()) for s in _mixer_stacks(m, name) * n),
        *mlp * chunk.dense,
        *(shared + routed + changed) * chunk.sparse,
        *[Stack(1, h, 2 * h)] * chunk.mtp,
    ]


def _mixer_stacks(m: ModelConfig, name: str) -> list[Stack]:
    mixer = mixer_of(name)
    found = [Stack(1, rows, columns) for columns, rows in mixer.matrices(m)]
    if parts := mixer.input_parts(m):
        (number, rows), *others = parts
        inside = tuple((number, rows, m.hidden) for number, rows in others)
        found[0] = Stack(number, rows, m.hidden, others=inside)
    return found


def _largest_share(cfg: Config, world: int, held: Sequence[Stack]) -> Share:
    p = cfg.parallel
    of_dense, of_experts = optimizer_shards(cfg, world)
    bucket = max(_BUCKET, _BUCKET_OF_RANK * data_parallel_size(cfg, world)) if p.overlap else None
    # Each tensor parallel rank stores its part of a dense matrix, and computes all of it.
    dense = [(s.elements // p.tensor, s.flops) for s in held if not s.expert]
    experts = [(s.elements, s.flops) for s in held if s.expert]
    shares = (_assigned(dense, of_dense, bucket), _assigned(experts, of_experts, bucket))
    elements, flops, padding = (sum(values) for values in zip(*shares, strict=True))
    return Share(elements, flops, padding)  # type: ignore[arg-type]


def _assigned(sizes: list[tuple[int, float]], ranks: int, bucket: int | None) -> Share:
    """Largest share of parameters of some (elements, FLOPs) in buckets; None makes one bucket."""
    most, flops, waiting = 0, 0.0, list[tuple[int, float]]()
    for i, size in enumerate(reversed(sizes)):
        waiting.append(size)
        enough = _FULL * ranks * max(waiting)[0]
        last = i + 1 == len(sizes)
        if not last and (bucket is None or sum(n for n, _ in waiting) < max(bucket, enough)):
            continue
        bins = [[0, 0.0] for _ in range(ranks)]
        for elements, work in sorted(waiting, reverse=True):
            least = min(bins)
            least[0] += elements
            least[1] += work
        most += int(max(bins)[0])
        flops += max(work for _, work in bins)
        waiting = []
    return Share(most, flops, ranks * most - sum(n for n, _ in sizes))
