"""What Muon costs: the matrices that it makes orthogonal, who owns them, and the products.

A data parallel rank of the sharded optimizer owns whole parameters (parallel.megatron.matrices).
Megatron-Core deals those of each bucket of gradients out in order of size, each to the rank that
has least, and gives all ranks as much room as the one that has most; so does this.
"""

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.configs.activations import ACTIVATIONS
from phalanx.configs.layout import data_parallel_size, expert_parallel_size, stage_ranks
from phalanx.configs.linear_attention import HEAD_DIM
from phalanx.configs.schema import Config
from phalanx.moe.estimate.accounting import projections

_BUCKET, _BUCKET_OF_RANK = 40_000_000, 1_000_000
"""Elements of a bucket whose reduction overlaps, at least; more of many ranks (Megatron-Core)."""
_FULL = 0.9
"""How full of parameters Megatron-Core has a bucket be before it deals them out."""


class Stack(NamedTuple):
    """Matrices of one parameter, whole: of one shape, and others of other shapes."""

    number: int
    rows: int
    columns: int
    expert: bool = False
    others: tuple[tuple[int, int, int], ...] = ()
    """Number, rows and columns of these."""

    @property
    def elements(self) -> int:
        """Of all of them."""
        return sum(number * rows * columns for number, rows, columns in self._shapes())

    @property
    def flops(self) -> float:
        """Of one Newton-Schulz iteration: X X^T, its square, and their product with X."""
        total = 0.0
        for number, rows, columns in self._shapes():
            short, long = sorted((rows, columns))
            total += number * (4.0 * short**2 * long + 2.0 * short**3)
        return total

    def _shapes(self) -> tuple[tuple[int, int, int], ...]:
        return (self.number, self.rows, self.columns), *self.others


class Share(NamedTuple):
    """Of the rank that has most."""

    elements: int
    flops: float
    """Of one iteration."""
    padding: int
    """Elements of the buffers of gradients and of parameters that belong to no parameter."""


def stacks(
    cfg: Config, world: int, *, dense: int, sparse: int, mtp: int, linear: int = 0
) -> list[Stack]:
    """Of so many layers with and without experts, of which `mtp` are prediction layers and `linear`
    have linear attention; none for an optimizer other than Muon."""
    if cfg.optim.kind != "muon":
        return []
    m, e, up = cfg.model, cfg.model.moe, ACTIVATIONS[cfg.model.moe.activation].halves
    h, a = m.hidden, m.attention
    attention = [Stack(1, rows, columns) for columns, rows in projections(h, a)]
    if a.kind == "gqa":
        query, key = a.heads * a.head_dim, a.kv_heads * a.head_dim
        attention[:1] = [Stack(1 + a.output_gate, query, h, others=((2, key, h),))]
    lin = m.linear_attention
    keys, values = lin.key_heads * HEAD_DIM, lin.value_heads * HEAD_DIM
    inside = ((2, values, h), (2, lin.value_heads, h))
    state = [Stack(2, keys, h, others=inside), Stack(1, h, values)]
    mlp = [Stack(up, m.dense_ffn, h), Stack(1, h, m.dense_ffn)]
    shared = [Stack(up, e.shared_ffn, h), Stack(1, h, e.shared_ffn)] if e.shared_ffn else []
    local = e.experts // expert_parallel_size(cfg, world)
    routed = [Stack(up * local, e.ffn, h, True), Stack(local, h, e.ffn, True)]
    return [
        *attention * (dense + sparse - linear),
        *state * linear,
        *mlp * dense,
        *(shared + routed) * sparse,
        *[Stack(1, h, 2 * h)] * mtp,
    ]


def owned(cfg: Config, world: int, held: Sequence[Stack]) -> Share:
    """What the ranks of a stage hold, dealt out; all of it if nothing is sharded.

    Args:
        cfg: valid.
        world: ranks.
        held: matrices of a stage, in the order of its layers.
    """
    p = cfg.parallel
    replicas = data_parallel_size(cfg, world) * p.context
    copies = stage_ranks(cfg, world) // expert_parallel_size(cfg, world)
    bucket = max(_BUCKET, _BUCKET_OF_RANK * data_parallel_size(cfg, world)) if p.overlap else None
    if not p.distributed_optimizer:
        replicas = copies = 1
    # Tensor parallel ranks each keep their part of a dense matrix, and each compute all of it.
    dense = [(s.elements // p.tensor, s.flops) for s in held if not s.expert]
    experts = [(s.elements, s.flops) for s in held if s.expert]
    shares = (_dealt(dense, replicas, bucket), _dealt(experts, copies, bucket))
    elements, flops, padding = (sum(values) for values in zip(*shares, strict=True))
    return Share(elements, flops, padding)  # type: ignore[arg-type]


def _dealt(sizes: list[tuple[int, float]], ranks: int, bucket: int | None) -> Share:
    """Of (elements, FLOPs) of each parameter; `bucket` elements or more are dealt out at once."""
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
