"""Which transport takes tokens to their experts, and why: one answer for all ranks of a group.

It is asked for once, before any layer is made. Every rank tells what it knows of itself, hears that
of all others, and decides by the same rules: what one rank cannot do, its group does not do.
`planned` answers without ranks, for machines that are only described.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from phalanx.kernels.registry import Choice
from phalanx.parallel.dispatch import deepep, nodes, symm
from phalanx.parallel.dispatch.nodes import Nodes
from phalanx.parallel.fault.agreement import gather

TRANSPORTS = ("auto", "local", "alltoall", "symm", "hier", "deepep")


@dataclass(frozen=True)
class Transport:
    """What an expert-parallel group takes, the same on all of its ranks."""

    name: str
    """Of `TRANSPORTS`, never `auto`; or `megatron`, which is Megatron-Core's own."""
    reason: str
    """Clauses, separated by semicolons."""
    inside: "Transport | None" = None
    """Of `hier`: `symm` or `alltoall` inside its nodes."""
    nodes: Nodes | None = None
    """Of `hier`: its process groups, which `planned` does not make."""


LOCAL = Transport("local", "all experts are on one rank")


def of_megatron(wanted: str) -> Transport:
    """That of Megatron-Core's own layer, whatever is `wanted`."""
    asked = "" if wanted == "auto" else f"; parallel.dispatch={wanted} is not in effect"
    return Transport("megatron", f"kernels.backend=megatron has its own{asked}")


class Rank(NamedTuple):
    """What the choice depends on, of one rank."""

    number: int
    """In the job."""
    host: str
    node: str
    symm: str = ""
    """Why it cannot serve in `symm`; empty if it can."""
    deepep: str = ""
    """The same for `deepep`; only looked at where that is asked for."""


def choose_transport(wanted: str, group: dist.ProcessGroup | None, dtype: torch.dtype) -> Transport:
    """The transport of this rank's group. All ranks of the job call it together.

    Args:
        wanted: of `TRANSPORTS`. `auto` is `local` on one rank; on several `symm` where it can run,
            `hier` where the group has the same number of ranks, above one, on each of several
            nodes, or `alltoall`.
        group: expert-parallel, each rank's own; None is one rank.
        dtype: of tokens.

    Raises:
        ValueError: on all ranks of the job, with what to set: an unknown name, or a transport that
            cannot serve one of the groups.
    """
    if group is None and wanted == "alltoall":
        raise ValueError(
            "parallel.dispatch=alltoall needs an expert-parallel process group: "
            "set parallel.dispatch=local"
        )
    if group is None or group.size() == 1:  # as all groups of the job are
        return resolve(wanted, [_here(wanted, dtype)])
    mine, ranks = _gathered(wanted, group, dtype)
    found = {numbers: resolve(wanted, members) for numbers, members in ranks.items()}
    chosen = replace(found[mine], reason=found[mine].reason + _elsewhere(found, mine))
    over_nodes = [numbers for numbers, transport in found.items() if transport.name == "hier"]
    # All ranks of the job make the process groups of all groups.
    made = nodes.join({n: [rank.node for rank in ranks[n]] for n in over_nodes})
    return replace(chosen, nodes=made) if chosen.name == "hier" else chosen


def reason_against(name: str, group: dist.ProcessGroup, dtype: torch.dtype) -> str:
    """Why a transport cannot serve the groups of the job; empty if it can.

    All ranks of the job ask together, as in `choose_transport`.
    """
    _, ranks = _gathered(name, group, dtype)
    return next((text for members in ranks.values() if (text := _against(name, members))), "")


def planned(
    wanted: str, *, ranks: int, node_ranks: int, symm: str = "", deepep: str = ""
) -> Transport:
    """What `choose_transport` will find on machines that are all alike, without them.

    Args:
        wanted: of `TRANSPORTS`.
        ranks: of an expert-parallel group: neighbours, the first of which begins a node.
        node_ranks: of a node.
        symm, deepep: why a rank cannot serve in these transports; empty if it can. For this machine
            `parallel.dispatch.symm.reason_here` and `parallel.dispatch.deepep.reason_here` say it.

    Raises:
        ValueError: as `choose_transport` does.
    """
    hosts = [f"node {i // node_ranks}" for i in range(ranks)]
    return resolve(wanted, [Rank(i, host, host, symm, deepep) for i, host in enumerate(hosts)])


def resolve(wanted: str, ranks: Sequence[Rank]) -> Transport:
    """The transport of one group, from what its ranks tell, in their order.

    Raises:
        ValueError: `wanted` is unknown or cannot serve them.
    """
    if wanted not in TRANSPORTS:
        known = f"{', '.join(TRANSPORTS[:-1])} or {TRANSPORTS[-1]}"
        raise ValueError(f"unknown parallel.dispatch={wanted}: set it to {known}")
    if wanted == "local" and len(ranks) > 1:
        raise ValueError(
            f"parallel.dispatch=local serves one rank, but parallel.expert is {len(ranks)}: "
            "set parallel.dispatch=alltoall or parallel.expert=1"
        )
    if wanted != "auto":
        if against := _against(wanted, ranks):
            raise ValueError(
                f"parallel.dispatch={wanted} cannot run: {against}; set parallel.dispatch=auto"
            )
        return _made(wanted, f"parallel.dispatch={wanted}", ranks)
    if len(ranks) == 1:
        return Transport("local", f"auto; {LOCAL.reason}")
    reason = "auto"
    for name in ("symm", "hier"):
        against = _against(name, ranks)
        if not against:
            return _made(name, reason, ranks)
        reason += f"; not {name}: {against}"
    return Transport("alltoall", reason)


def choices(transport: Transport, *, backend: str, comm_sms: int, shared: bool) -> list[Choice]:
    """Lines of `kernels.registry.table`: the transport, and what runs beside its exchanges.

    Args:
        transport: of this rank's group.
        backend: of the experts.
        comm_sms: `parallel.comm_sms`.
        shared: layers have shared experts.
    """
    lines = [Choice("transport", transport.name, transport.reason)]
    if transport.inside is not None:
        lines.append(Choice("- in a node", transport.inside.name, transport.inside.reason))
    return [*lines, _overlap(transport, backend, comm_sms, shared)]


def waits_for_tokens(backend: str) -> bool:
    """Whether the kernels of an expert backend can begin with the tokens that are there."""
    return backend == "fused"


_WAITED_FOR = {
    "local": "nothing is exchanged",
    "alltoall": "alltoall cannot overlap: it is over when it returns",
    "deepep": "deepep cannot overlap: its counts are waited for",
    "megatron": "Megatron-Core's layer waits for its exchanges",
}


def _overlap(transport: Transport, backend: str, comm_sms: int, shared: bool) -> Choice:
    """What the experts do while tokens are on their way, and why not more."""
    exchange = (transport.inside or transport).name
    asked, without = f"parallel.comm_sms={comm_sms}", ""
    if exchange != "symm":
        without = _WAITED_FOR.get(exchange, f"{exchange} cannot overlap")
    elif not waits_for_tokens(backend):
        without = f"{backend} experts cannot wait for tokens"
    if exchange == "symm" and comm_sms and (shared or not without):
        reason = f"{asked}; beside the shared experts alone: {without}" if without else asked
        if transport.inside is not None:
            reason += "; inside nodes alone: what goes between them is waited for"
        return Choice("overlap", f"{comm_sms} SMs", reason)
    if exchange == "deepep" and comm_sms:
        without += f"; {asked} are those of its kernels"
    elif comm_sms:
        without += f"; {asked} is not in effect"
    return Choice("overlap", "off", without or asked)


def _here(wanted: str, dtype: torch.dtype) -> Rank:
    """What this rank tells of itself."""
    number = dist.get_rank() if dist.is_initialized() else 0
    host, node = nodes.names_here(number)
    package = deepep.reason_here(dtype) if wanted == "deepep" else ""
    return Rank(number, host, node, symm.reason_here(dtype), package)


def _gathered(
    wanted: str, group: dist.ProcessGroup, dtype: torch.dtype
) -> tuple[tuple[int, ...], dict[tuple[int, ...], list[Rank]]]:
    """This rank's group, by the numbers of its ranks, and what the ranks of all groups tell."""
    mine = tuple(dist.get_process_group_ranks(group))
    told = gather((mine, _here(wanted, dtype)))
    groups = sorted({numbers for numbers, _ in told})
    return mine, {numbers: [told[n][1] for n in numbers] for numbers in groups}


def _made(name: str, reason: str, ranks: Sequence[Rank]) -> Transport:
    if name != "hier":
        return Transport(name, reason)
    against = _against_pushes(ranks, across_nodes=True)
    inside = Transport("alltoall", f"auto; not symm: {against}") if against else None
    return Transport(name, reason, inside or Transport("symm", "auto"))


def _against(name: str, ranks: Sequence[Rank]) -> str:
    """Why a transport cannot serve a group; empty if it can."""
    if name == "hier":
        return nodes.uneven([rank.node for rank in ranks])
    if name == "symm":
        return _against_pushes(ranks)
    if name == "deepep":
        return _one_for_all(ranks, "deepep") or _alone(ranks)
    return ""


def _against_pushes(ranks: Sequence[Rank], *, across_nodes: bool = False) -> str:
    """Why ranks cannot write to each other's memory, or to those of their node; empty if so."""
    if against := _one_for_all(ranks, "symm") or _alone(ranks):
        return against
    parts = [(rank.node if across_nodes else "", rank.host) for rank in ranks]
    if len(set(parts)) > len({part for part, _ in parts}):
        return "the ranks of an expert-parallel group are on several hosts"
    return ""


def _alone(ranks: Sequence[Rank]) -> str:
    return "needs several ranks" if len(ranks) == 1 else ""


def _one_for_all(ranks: Sequence[Rank], name: str) -> str:
    """The reason of one rank is that of all. Whose it is, unless all have the same."""
    reasons = [getattr(rank, name) for rank in ranks]
    if len(set(reasons)) == 1:
        return str(reasons[0])
    have = [rank for rank in ranks if getattr(rank, name)]
    more = f" and {len(have) - 1} more" if len(have) > 1 else ""
    return f"{getattr(have[0], name)} (rank {have[0].number} on {have[0].host}{more})"


def _elsewhere(found: dict[tuple[int, ...], Transport], mine: tuple[int, ...]) -> str:
    """A clause on the groups that take something else than this one."""

    def taken(transport: Transport) -> str:
        inside = transport.inside
        return transport.name + (f" with {inside.name} in a node" if inside else "")

    others = {n: t for n, t in found.items() if taken(t) != taken(found[mine])}
    if not others:
        return ""
    numbers, first = next(iter(others.items()))
    why = (first.inside or first).reason.removeprefix("auto; ").replace("; ", ", ")
    return (
        f"; {len(others)} of {len(found)} groups differ: that of rank {numbers[0]} takes "
        f"{taken(first)} ({why})"
    )
