"""Load balance of the experts: balancing losses, exact counts, and statistics for the log.

A router counts its choices and adds its balancing losses to its `Statistics`, on the device and
without a host read. Every step collects them in one table (`Collector`), which is summed over all
ranks with the step's other totals. Invariants: counts are int64; a loss is stored as this rank's
share, so that the sum over tensor and context parallel ranks is the loss of one replica, on any
layout.

Legend: T tokens of this rank, B sequences, E experts, K experts per token.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.configs.schema import RouterConfig
from phalanx.kernels.routing.balance import KeepsPrecision
from phalanx.parallel.dispatcher.transport_class import LoadCounts

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss", "indexer_loss")
"""Balancing losses, by the RouterConfig fields of their coefficients; and that of an indexer."""


class Statistics(KeepsPrecision):
    """Statistics of a router since `reset`: choices per expert, loss shares, micro-batches."""

    tokens_per_expert: Tensor
    losses: Tensor
    micro_batches: Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        for name, shape, dtype in (
            ("tokens_per_expert", (experts,), torch.int64),
            ("losses", (len(LOSSES),), torch.float32),
            ("micro_batches", (), torch.int64),
        ):
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)
        self.notes: list[Any] = []  # of the micro-batches since the last table, which counts them
        self._takes_notes = False

    def extend(self, counts: LoadCounts) -> None:
        """Add a buffer for the counts of a transport."""
        zeros = self.tokens_per_expert.new_zeros(counts.columns)
        self.register_buffer(counts.name, zeros, persistent=False)
        self._takes_notes = True

    @torch.no_grad()
    def add_counts(self, count_E: Tensor) -> None:
        """Add the choices of one micro-batch: int64 [E]."""
        self.tokens_per_expert += count_E
        self.micro_batches += 1

    @torch.no_grad()
    def add_loss(self, name: str, share: Tensor) -> None:
        """Add this rank's share of one of `LOSSES`, before its coefficient."""
        self.losses[LOSSES.index(name)] += share.detach()

    def note(self, statistics: Any) -> None:
        """Keep what a transport notes of one micro-batch, if its counts have a buffer."""
        if self._takes_notes:
            self.notes.append(statistics)


@dataclass(frozen=True)
class Balance:
    """Load balance of all MoE layers since the last `reset`; the same on every rank."""

    load: dict[int, float] = field(default_factory=dict)
    """Layer number (1-based; prediction layers follow the last decoder layer) -> load of its
    busiest expert over the mean load. 1 is perfect, E / K the worst."""
    idle: frozenset[tuple[int, int]] = frozenset()  # (layer number, expert) that no token chose
    rank_load: float = 0.0
    """Choices of the experts of the busiest rank over the mean of ranks, averaged over layers, of
    all micro-batches together; 0 if the experts of a layer are on one rank."""
    counted: Mapping[str, float] = field(default_factory=dict)  # the transport's, by logged name
    losses: dict[str, float] = field(default_factory=dict)
    """Balancing losses before their coefficients, mean over layers and micro-batches."""

    @property
    def dead(self) -> int:
        """Number of experts that no token chose, summed over layers."""
        return len(self.idle)

    @property
    def by_layer(self) -> dict[str, tuple[float, int]]:
        """Layer number -> load of its busiest expert over the mean, number of idle experts."""
        idle = Counter(layer for layer, _ in self.idle)
        return {str(n): (round(load, 3), idle[n]) for n, load in self.load.items()}

    @property
    def worst(self) -> float:
        """Largest load over the layers."""
        return max(self.load.values(), default=0.0)

    @property
    def p95(self) -> float:
        """95th percentile of the load over the layers."""
        if not self.load:
            return 0.0
        return float(torch.tensor(list(self.load.values())).quantile(0.95))


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Routers of this rank's model chunks, in order: the modules that hold a `Statistics`."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(getattr(module, "statistics", None), Statistics):
                yield module


class Collector:
    """Statistics of all routers of a model as one table, and the summary of all ranks' table.

    The `chunks` are those of this rank, wrapped or not; `pg` has `tp_cp` and `ep`; `counts` are
    those of the transports of any rank, which layers have a buffer for.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: Any,
        pg: ProcessGroupCollection,
        counts: LoadCounts | None = None,
    ) -> None:
        self._experts = config.num_moe_experts or 0  # a dense model has no router
        self._replica_ranks = pg.tp_cp.size()
        self._ep, self._ranks = pg.ep, pg.ep.size()
        layers = config.num_layers + (config.mtp_num_layers or 0)
        self._by_layer: list[list[Statistics]] = [[] for _ in range(layers)]
        for router in routers(chunks):
            self._by_layer[layer_index(router, config)].append(router.statistics)
        self._zeros, self._counts = Statistics(self._experts), counts
        if counts is not None:
            self._zeros.extend(counts)

    def table(self) -> Tensor:
        """This rank's part, fp64 [layers, counts | losses | micro-batches | counts of transports].

        No host read. The sum over all ranks is the table of the model: exact for counts below
        2**53, and 0 in the rows of layers that no rank has or that route nothing. Collective.
        """
        names = ["tokens_per_expert", "losses", "micro_batches"]
        if self._counts is not None:
            self._count(self._counts)
            names.append(self._counts.name)
        return torch.cat([self._column(name).flatten(1) for name in names], 1)

    def _column(self, name: str) -> Tensor:
        values = [[getattr(s, name) for s in layer or [self._zeros]] for layer in self._by_layer]
        column = torch.stack([sum(parts[1:], parts[0]) for parts in values]).double()
        return column if column.ndim > 1 else column[:, None]

    @torch.no_grad()
    def _count(self, counts: LoadCounts) -> None:
        noted = [s for layer in self._by_layer for s in layer if s.notes]
        if not noted:
            return
        found = counts.count([s.notes for s in noted], self._ep)
        for s, more in zip(noted, found, strict=True):
            getattr(s, counts.name).add_(more)
            s.notes.clear()

    def read(self, table: Tensor) -> Balance:
        """Summary of the table of all ranks, in any shape, on the host."""
        table = table.view(len(self._by_layer), -1)
        return _summary(table, self._experts, self._ranks, self._replica_ranks, self._counts)


def layer_index(router: Any, config: Any) -> int:
    """0-based index of a router's layer in the model; prediction layers follow the decoder's."""
    return router.layer_number - 1 + (config.num_layers if router.is_mtp_layer else 0)


def _summary(
    table: Tensor, experts: int, ranks: int, replica_ranks: int, counts: LoadCounts | None
) -> Balance:
    columns = 0 if counts is None else counts.columns
    count, losses, micro_batches, more = table.split([experts, len(LOSSES), 1, columns], 1)
    used = [i for i, n in enumerate(micro_batches.flatten().tolist()) if n]
    if not used:
        return Balance()
    count, losses, micro_batches = count[used], losses[used], micro_batches[used]
    load = count.amax(1) / count.mean(1)
    per_rank = count.unflatten(1, (ranks, -1)).sum(2)
    load_of_ranks = per_rank.amax(1) / per_rank.mean(1)
    mean = (losses / micro_batches * replica_ranks).mean(0)
    return Balance(
        load={i + 1: value for i, value in zip(used, load.tolist(), strict=True)},
        idle=frozenset((used[row] + 1, e) for row, e in (count == 0).nonzero().tolist()),
        rank_load=float(load_of_ranks.mean()) if ranks > 1 else 0.0,
        counted={} if counts is None else counts.values(more[used], micro_batches[:, 0], ranks),
        losses=dict(zip(LOSSES, mean.tolist(), strict=True)),
    )


def reset(chunks: Sequence[torch.nn.Module]) -> None:
    """Clear the statistics, after they were logged."""
    for group in _by_dtype(b for router in routers(chunks) for b in router.statistics.buffers()):
        torch._foreach_zero_(group)


def snapshot(chunks: Sequence[torch.nn.Module]) -> list[Tensor]:
    """Copies of all counts, losses and expert biases, for a step that may have to be repeated."""
    buffers = _buffers(chunks)
    saved = [torch.empty_like(buffer) for buffer in buffers]
    _copy(saved, buffers)
    return saved


def restore(chunks: Sequence[torch.nn.Module], saved: Sequence[Tensor]) -> None:
    """Restore the copies of `snapshot`, in place."""
    _copy(_buffers(chunks), saved)


def _buffers(chunks: Sequence[torch.nn.Module]) -> list[Tensor]:
    return [buffer for router in routers(chunks) for buffer in router.buffers()]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy all tensors, by one launch for each dtype."""
    for target, source in zip(_by_dtype(targets), _by_dtype(sources), strict=True):
        torch._foreach_copy_(target, source)


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


@dataclass(frozen=True)
class Recorder:
    """Counts and losses of one router by a few kernels on a GPU, in place of thirty launches.

    The formulas are those of this file, by `kernels.routing.balance_triton`.
    """

    options: RouterConfig
    statistics: Statistics
    local_tokens_E: Tensor | None  # choices since the last update of the expert bias, int64
    global_tokens_E: Tensor | None  # of all replicas in this global batch, int64
    replica: dist.ProcessGroup  # group of ranks that share sequences
    world: dist.ProcessGroup  # group of all replicas
    per_token: bool  # the schedule divides gradients by tokens

    @property
    def balances(self) -> bool:
        """True if there is a loss of counts and scores."""
        o = self.options
        return bool(o.aux_loss or o.seq_aux_loss or o.global_aux_loss)

    def __call__(
        self, logits_TE: Tensor, idx_TK: Tensor, judged_TK: Tensor | None, sequences: int
    ) -> Tensor | None:
        """Count choices and return the weighted sum of the balancing losses [1], if there are any.

        `judged_TK` are the choices that the losses are computed of, if others than `idx_TK`.
        """
        logits_TE = logits_TE.contiguous()
        if not (self.balances or self.options.z_loss):
            self.finish(logits_TE.detach(), idx_TK, None, 1)
            return None
        sequences = sequences if self.options.seq_aux_loss else 1
        return _Losses.apply(logits_TE, self, idx_TK, judged_TK, sequences)  # type: ignore[no-any-return]

    def finish(
        self, logits_TE: Tensor, idx_TK: Tensor, judged_TK: Tensor | None, sequences: int
    ) -> tuple[Tensor, Tensor]:
        """Loss [1] and its slope [B, E]; see `kernels.routing.balance_triton.Terms.finish`."""
        from phalanx.kernels.routing.balance_triton import Counters, tally

        o, s = self.options, self.statistics
        counts = tally(
            logits_TE,
            idx_TK,
            sequences=sequences,
            score=o.score if self.balances else None,
            judged_TK=judged_TK if self.balances else None,
            log_sum=bool(o.z_loss),
        )
        judged_BE = counts.judged_BE
        if self.balances and self.replica.size() > 1:
            judged_BE = judged_BE.contiguous()
            dist.all_reduce(judged_BE, group=self.replica)
        if o.global_aux_loss:
            assert self.global_tokens_E is not None
            judged_E = counts.judged_BE.sum(0).long()
            if self.world.size() > 1:
                dist.all_reduce(judged_E, group=self.world)
            self.global_tokens_E.add_(judged_E)
        counters = Counters(s.tokens_per_expert, self.local_tokens_E, s.micro_batches, s.losses)
        seen_E = self.global_tokens_E if o.global_aux_loss else None
        return self.terms(len(logits_TE)).finish(counts, judged_BE, seen_E, counters)

    def terms(self, tokens: int) -> Any:
        """Coefficients of the losses for `tokens` tokens of this rank."""
        from phalanx.kernels.routing.balance_triton import Terms

        o, total = self.options, tokens * self.replica.size()
        coefficients = o.aux_loss, o.seq_aux_loss, o.global_aux_loss, o.z_loss
        return Terms(*coefficients, tokens=total, factor=total if self.per_token else 1.0)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, recorder: Recorder, *choices: Any) -> Tensor:
        loss, slope_BE = recorder.finish(logits_TE, *choices)
        ctx.save_for_backward(logits_TE, slope_BE if recorder.balances else None)
        ctx.recorder = recorder
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        from phalanx.kernels.routing.balance_triton import slope_to_logits

        logits_TE, slope_BE = ctx.saved_tensors
        terms = ctx.recorder.terms(len(logits_TE))
        z_slope = 2 * terms.z * terms.factor / terms.tokens
        score = ctx.recorder.options.score
        dlogits_TE = slope_to_logits(dloss, logits_TE, slope_BE, score, z_slope)
        return dlogits_TE, None, None, None, None
