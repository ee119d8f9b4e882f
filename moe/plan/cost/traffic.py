"""Expert traffic between ranks: rows and bytes per token, by kind of link.

Exact expectation over uniformly random routing (`parallel.dispatcher.costs`). Rows have
the precision of the run; dispatched rows may be FP8 (`precision.dispatch`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

import torch

from phalanx.configs.arithmetic.layers import expert_hidden
from phalanx.configs.formats import in_bf16, quantizes_on_arrival, rows_in_fp8, width
from phalanx.configs.layout import expert_parallel_size, replica_slots
from phalanx.configs.remembered import GROUPS, STEP, remembered
from phalanx.configs.schema import Config, MoEConfig
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.machines import machine_named
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.kernels.quantize import quantize
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.costs import (
    NOTHING,
    GroupTopology,
    Links,
    TopKSampling,
    TransportCosts,
    most_owners,
    owner_probabilities,
)
from phalanx.parallel.dispatcher.transport import class_of
from phalanx.parallel.dispatcher.transport_class import waits_for_tokens


@dataclass(frozen=True)
class Traffic:
    """Expected traffic of one MoE layer and one token."""

    ranks: float  # ranks that hold one of the token's experts, its own rank included
    nodes: float  # nodes of `run.machine` that hold one of them
    most_nodes: int  # bound on these nodes, if the router chooses experts from some groups only
    dispatch: Links  # rows sent to the experts
    combine: Links  # rows sent back
    there: Links  # bytes of dispatch; of the gradients of sums as well
    back: Links  # bytes of combine; of the gradients of tokens as well
    resent: Links  # bytes of tokens and sums that the backward pass sends a second time

    @property
    def forward(self) -> Links:
        """Bytes of the forward pass."""
        return self.there + self.back

    @property
    def backward(self) -> Links:
        """Bytes of the backward pass."""
        return self.forward + self.resent


@remembered(*STEP)
def traffic(cfg: Config, world: int) -> Traffic:
    """Traffic of `parallel.dispatch`, or of the backend's own dispatcher."""
    own = expert_backend(cfg.kernels.backend).own_exchange
    sent = resolve_name(own)(cfg, reach(cfg, world)) if own else costs(cfg, world)
    there, back = (sent.there, sent.back) if resends(cfg) else (NOTHING, NOTHING)
    return _traffic(cfg, world, (sent.there, sent.back), (there + sent.resent, back))


def least_traffic(cfg: Config, world: int) -> Traffic:
    """Least traffic of any transport over each kind of link.

    A row is sent once to each other node with one of the token's experts, and to each such rank of
    its own node; one sum comes back from each; recomputed experts receive rows a second time.
    """
    group = reach(cfg, world)
    # Ranks of other nodes may receive theirs over the network.
    rows = Links(group.once_a_rank.near, group.once_a_node.far)
    resent = rows if resends(cfg) else NOTHING
    return _traffic(cfg, world, (rows, rows), (resent, NOTHING))


def resends(cfg: Config) -> bool:
    """Does the backward pass repeat both exchanges, because it recomputes MoE layers?"""
    return not {"moe", "full"}.isdisjoint(cfg.run.recompute)


def nodes(cfg: Config, world: int) -> int:
    """Nodes of `run.machine` that an expert-parallel group spans; its ranks are consecutive."""
    return -(-expert_parallel_size(cfg, world) // machine_named(cfg.run.machine).node_gpus)


@remembered("model", *GROUPS, "data.sequence_length", "precision")
def costs(cfg: Config, world: int) -> TransportCosts:
    """Rows that the transport of `parallel.dispatch` sends and holds; `cfg` has no `auto` there."""
    return class_of(cfg.parallel.dispatch).costs(reach(cfg, world))


def overlap_sms(cfg: Config, world: int) -> int | str:
    """SMs that exchange while experts compute, or `auto` before the choice; 0: no overlap."""
    if cfg.parallel.overlap_microbatches == "on":
        return 0
    waits = waits_for_tokens(cfg.kernels.backend, quantizes_on_arrival(cfg))
    return cfg.parallel.comm_sms if waits and costs(cfg, world).exposed < 1 else 0


@remembered("model", *GROUPS, "data.sequence_length", "precision")
def reach(cfg: Config, world: int) -> GroupTopology:
    """The expert-parallel group, and the ranks and nodes that an average token is sent to."""
    e, p, d = cfg.model.moe, cfg.parallel, cfg.data
    by_node = _node_sizes(cfg, world)
    on_nodes = _probabilities(e, by_node)
    hosts = zip(on_nodes, by_node, strict=True)
    tokens = d.micro_batch * d.sequence_length // p.context // p.tensor
    budget = Budget(max(1.0, p.capacity_factor), torch.device("cpu"))
    return GroupTopology(
        ranks=expert_parallel_size(cfg, world),
        nodes=nodes(cfg, world),
        tokens=tokens,
        wanted_ranks=sum(_probabilities(e, _rank_sizes(cfg, world))),
        other_nodes=sum(hit * (1 - held / e.experts) for hit, held in hosts if held),
        block=budget.block_rows(tokens, max(on_nodes)) if any(by_node) else 0,
        pushes=in_bf16(cfg) and cfg.run.device != "cpu",
        keep=p.save_x == "keep",
        rows_back=e.top_k if replica_slots(cfg, world) else 1,
    )


def received(cfg: Config, world: int) -> int:
    """Number of rows that a rank receives, most of them without data where pushes bring them."""
    group = reach(cfg, world)
    over_nodes = TRANSPORTS[cfg.parallel.dispatch].over_nodes
    return group.received_blocks if over_nodes else group.received


def row_bytes(cfg: Config) -> int:
    """Bytes of a dispatched token, or gradient."""
    hidden, fp8 = expert_hidden(cfg.model), rows_in_fp8(cfg)
    return quantize.row_bytes(hidden) if fp8 else hidden * width(cfg)


def _traffic(
    cfg: Config, world: int, once: tuple[Links, Links], resent: tuple[Links, Links]
) -> Traffic:
    """Traffic of rows (dispatch, combine) sent in both passes, and `resent` in the backward one."""
    to, fro = row_bytes(cfg), expert_hidden(cfg.model) * width(cfg)
    ranks = sum(_probabilities(cfg.model.moe, _rank_sizes(cfg, world)))
    by_node = _node_sizes(cfg, world)
    hosts, most = (
        sum(_probabilities(cfg.model.moe, by_node)),
        most_owners(_sampling(cfg.model.moe), by_node),
    )
    (there, back), (again, back_again) = once, resent
    more = to * again + fro * back_again
    return Traffic(ranks, hosts, most, there, back, to * there, fro * back, more)


def _rank_sizes(cfg: Config, world: int) -> list[int]:
    ranks = expert_parallel_size(cfg, world)
    return [cfg.model.moe.experts // ranks] * ranks


def _node_sizes(cfg: Config, world: int) -> list[int]:
    """Experts of each node; the last may be smaller."""
    by_rank, most = _rank_sizes(cfg, world), machine_named(cfg.run.machine).node_gpus
    return [sum(by_rank[i : i + most]) for i in range(0, len(by_rank), most)]


def _probabilities(e: MoEConfig, sizes: Sequence[int]) -> list[float]:
    """Probability that a token has an expert of each owner; owner i holds the next `sizes[i]`."""
    if not any(sizes):  # a dense model
        return [0.0] * len(sizes)
    return owner_probabilities(_sampling(e), sizes)


def _sampling(e: MoEConfig) -> TopKSampling:
    return TopKSampling(e.experts, e.top_k, e.router.groups, e.router.group_topk)
