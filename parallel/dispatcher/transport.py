"""Which transport takes tokens to their experts, and why: one answer for all ranks of a group.

It is asked for once, before any layer is made. Every rank tells what it knows of itself, hears that
of all others, and decides by the same rules: what one rank cannot do, its group does not do.
`planned` answers without ranks, for machines that are only described.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name

import torch
import torch.distributed as dist

from phalanx.configs.transports import (
    AUTO_SMS,
    MAX_REPLICATED_EXPERTS,
    MAX_REPLICATION_RANKS,
    TRANSPORTS,
)
from phalanx.kernels.refusal import Refusal
from phalanx.kernels.registry import Choice
from phalanx.parallel.dispatcher import nodes
from phalanx.parallel.dispatcher.replication.options import CopyCosts, ReplicationOptions
from phalanx.parallel.dispatcher.transport_class import (
    Dispatcher,
    Rank,
    Transport,
    one_for_all,
    waits_for_tokens,
)
from phalanx.parallel.fault.agreement import gather

LOCAL = Transport("local", "all experts are on one rank")


def class_of(name: str) -> type[Dispatcher]:
    """The class that an entry of `configs.transports` names."""
    found: type[Dispatcher] = resolve_name(TRANSPORTS[name].implementation)
    return found


def of_megatron(wanted: str) -> Transport:
    """That of Megatron-Core's own layer, whatever is `wanted`."""
    asked = "" if wanted == "auto" else f"; parallel.dispatch={wanted} is not in effect"
    return Transport("megatron", f"kernels.backend=megatron has its own{asked}")


def choose_transport(wanted: str, group: dist.ProcessGroup | None, dtype: torch.dtype) -> Transport:
    """The transport of this rank's group. All ranks of the job call it together.

    Args:
        wanted: of `configs.transports`, or `auto`: on one rank `local`; on several the first of
            the table that `auto` may take and that can run.
        group: expert-parallel, each rank's own; None is one rank.
        dtype: of tokens.

    Raises:
        ValueError: on all ranks of the job, with what to set: an unknown name, or a transport that
            cannot serve one of the groups.
    """
    if group is None or group.size() == 1:  # as all groups of the job are
        alone = resolve(wanted, [_here(wanted, dtype)])
        if group is None and not TRANSPORTS[alone.name].one_rank:
            raise ValueError(
                f"parallel.dispatch={wanted} needs an expert-parallel process group: "
                f"set parallel.dispatch={LOCAL.name}"
            )
        return alone
    mine, ranks = _gathered(wanted, group, dtype)
    found = {numbers: resolve(wanted, members) for numbers, members in ranks.items()}
    chosen = replace(found[mine], reason=found[mine].reason + _elsewhere(found, mine))
    over_nodes = [numbers for numbers, taken in found.items() if taken.inside is not None]
    # All ranks of the job make the process groups of all groups.
    made = nodes.join({n: [rank.node for rank in ranks[n]] for n in over_nodes})
    return replace(chosen, nodes=made) if chosen.inside is not None else chosen


def refuse(name: str, group: dist.ProcessGroup, dtype: torch.dtype) -> Refusal:
    """Why a transport cannot serve the groups of the job.

    All ranks of the job ask together, as in `choose_transport`.
    """
    _, ranks = _gathered(name, group, dtype)
    return next((text for members in ranks.values() if (text := _refuse(name, members))), None)


def planned(
    wanted: str, *, ranks: int, node_ranks: int, refusals: Mapping[str, Refusal] | None = None
) -> Transport:
    """What `choose_transport` will find on machines that are all alike, without them.

    Args:
        wanted: of `configs.transports`, or `auto`.
        ranks: of an expert-parallel group: neighbours, the first of which begins a node.
        node_ranks: of a node.
        refusals: why a rank cannot serve, by the name of the transport; those of this machine are
            those of `refusals_here`. None: each can serve in all.

    Raises:
        ValueError: as `choose_transport` does.
    """
    hosts = [f"node {i // node_ranks}" for i in range(ranks)]
    return resolve(wanted, [Rank(i, host, host, refusals or {}) for i, host in enumerate(hosts)])


def refusals_here(wanted: str, dtype: torch.dtype) -> dict[str, Refusal]:
    """Why this rank cannot serve in the transports that a choice looks at, by their names."""
    names = [name for name, facts in TRANSPORTS.items() if wanted in ("auto", name)]
    asked = [name for name in names if wanted != "auto" or TRANSPORTS[name].auto]
    asked += [inside for name in asked for inside in class_of(name).asks()]
    return {name: class_of(name).refuse_here(dtype) for name in dict.fromkeys(asked)}


def resolve(wanted: str, ranks: Sequence[Rank]) -> Transport:
    """The transport of one group, from what its ranks tell, in their order.

    Raises:
        ValueError: `wanted` is unknown or cannot serve them.
    """
    if wanted not in ("auto", *TRANSPORTS):
        *known, last = ("auto", *TRANSPORTS)
        raise ValueError(
            f"unknown parallel.dispatch={wanted}: set it to {', '.join(known)} or {last}"
        )
    if wanted == "auto":
        return _best(ranks)
    if TRANSPORTS[wanted].one_rank and len(ranks) > 1:
        raise ValueError(
            f"parallel.dispatch={wanted} serves one rank, but parallel.expert is {len(ranks)}: "
            "set parallel.dispatch=alltoall or parallel.expert=1"
        )
    if against := _refuse(wanted, ranks):
        raise ValueError(
            f"parallel.dispatch={wanted} cannot run: {against}; set parallel.dispatch=auto"
        )
    return _made(wanted, f"parallel.dispatch={wanted}", ranks)


def _best(ranks: Sequence[Rank]) -> Transport:
    """What `auto` takes."""
    if len(ranks) == 1:
        return replace(LOCAL, reason=f"auto; {LOCAL.reason}")
    reason = "auto"
    for name, facts in TRANSPORTS.items():
        if not facts.auto or facts.one_rank:
            continue
        against = _refuse(name, ranks)
        if not against:
            return _made(name, reason, ranks)
        reason += f"; not {name}: {against}"
    raise AssertionError("no transport runs everywhere")


def sms_of(wanted: int | str, transport: Transport, backend: str, quantizes: bool = False) -> int:
    """What `parallel.comm_sms` comes to.

    Args:
        wanted: a number, which stays, or `auto`.
        transport: of this rank's group.
        backend: of the experts of all ranks.
        quantizes: they make FP8 of tokens that come in bf16.
    """
    if isinstance(wanted, int):
        return wanted
    within = (transport.inside or transport).name
    pushes = within in TRANSPORTS and class_of(within).no_overlap is None
    return AUTO_SMS if pushes and waits_for_tokens(backend, quantizes) else 0


def with_replication(
    wanted: int | str, transport: Transport, *, ranks: int, local: int, costs: CopyCosts, keep: bool
) -> Transport:
    """What `parallel.expert_replication` makes of the transport of a group.

    Args:
        wanted: a number of slots, or `auto`.
        transport: that was chosen.
        ranks: among which experts are replicated: of the group, or of each node where another
            transport is taken inside.
        local: experts of each.
        costs: of copies.
        keep: weights of replicas are kept for the backward pass.

    Raises:
        ValueError: slots are asked for that the transport cannot fill, or too large a group.
    """
    known = TRANSPORTS.get(transport.name)
    if wanted in (0, "auto") or ranks == 1:
        return transport
    if known is None or not known.replicates_experts:
        raise ValueError(
            f"parallel.expert_replication={wanted} cannot run: {transport.name} cannot replicate "
            "experts; set parallel.dispatch=auto or parallel.expert_replication=0"
        )
    if ranks > MAX_REPLICATION_RANKS or ranks * local > MAX_REPLICATED_EXPERTS:
        raise ValueError(
            f"parallel.expert_replication={wanted} serves {MAX_REPLICATED_EXPERTS} experts on "
            f"{MAX_REPLICATION_RANKS} ranks, "
            f"not {ranks * local} on {ranks}: set parallel.expert_replication=0"
        )
    replication = ReplicationOptions(int(wanted), costs.copy, keep, costs.any)
    if transport.inside is not None:
        return replace(transport, inside=replace(transport.inside, replication=replication))
    return replace(transport, replication=replication)


def replication_choices(wanted: int | str, transport: Transport) -> list[Choice]:
    """A line of `kernels.registry.table` on clones, where `parallel.expert_replication` asks for
    some."""
    if wanted == 0:
        return []
    within = transport.inside or transport
    if (of := within.replication) is not None:
        kept = "kept for" if of.keep else "sent again in"
        where = "; in each node by itself" if transport.inside else ""
        reason = f"parallel.expert_replication={wanted}{where}; {of.weighed}; weights are {kept}"
        slots = f"{of.slots} slot{'s' * (of.slots > 1)}"
        return [Choice("replication", slots, f"{reason} the backward pass")]
    if TRANSPORTS.get(transport.name, TRANSPORTS[LOCAL.name]).one_rank:
        return [
            Choice(
                "replication",
                "off",
                f"all experts are on one rank; parallel.expert_replication={wanted}",
            )
        ]
    facts = TRANSPORTS.get(transport.name)
    if facts is None or not facts.replicates_experts:
        reason = f"{transport.name} cannot replicate experts"
    elif class_of(within.name).no_overlap is not None:
        reason = f"{within.name} does not hide what replicas send"
    else:
        reason = "replicas cost a step more than they save where ranks are nearly even"
    return [Choice("replication", "off", f"auto; {reason}")]


def choices(
    transport: Transport,
    *,
    backend: str,
    comm_sms: int | str,
    shared: bool,
    quantizes: bool = False,
) -> list[Choice]:
    """Lines of `kernels.registry.table`: the transport, and what runs beside its exchanges.

    Args:
        transport: of this rank's group.
        backend: of the experts.
        comm_sms: `parallel.comm_sms`.
        shared: layers have shared experts.
        quantizes: as in `sms_of`.
    """
    lines = [Choice("transport", transport.name, transport.reason)]
    if transport.inside is not None:
        lines.append(Choice("- in a node", transport.inside.name, transport.inside.reason))
    sms = sms_of(comm_sms, transport, backend, quantizes)
    without = None
    if not waits_for_tokens(backend):
        without = f"{backend} experts cannot wait for tokens"
    elif quantizes:
        without = "experts make FP8 of tokens once all are there (precision.dispatch=bf16)"
    asked = "auto" if comm_sms == "auto" else f"parallel.comm_sms={comm_sms}"
    return [*lines, _overlap(transport, sms, asked, without, shared)]


_MEGATRON_WAITS = "Megatron-Core's layer waits for its exchanges"


def _overlap(
    transport: Transport, comm_sms: int, asked: str, cannot: str | None, shared: bool
) -> Choice:
    """What the experts do while tokens are on their way, and why not more.

    Args:
        comm_sms: SMs, for which the user `asked`.
        cannot: why the experts cannot begin with some of the tokens.
        shared: layers have shared experts.
    """
    name = (transport.inside or transport).name
    known = TRANSPORTS.get(name)
    never = class_of(name).no_overlap if known else _MEGATRON_WAITS
    without = never or cannot
    if comm_sms and never is None and (shared or without is None):
        reason = f"{asked}; beside the shared experts alone: {without}" if without else asked
        if transport.inside is not None:
            reason += "; inside nodes alone: what goes between them is waited for"
        return Choice("overlap", f"{comm_sms} SMs", reason)
    if comm_sms:
        own = never is not None and known is not None and known.comm_sms
        effect = "are those of its kernels" if own else "is not in effect"
        return Choice("overlap", "off", f"{without}; {asked} {effect}")
    return Choice("overlap", "off", without or asked)


def _here(wanted: str, dtype: torch.dtype) -> Rank:
    """What this rank tells of itself."""
    number = dist.get_rank() if dist.is_initialized() else 0
    host, node = nodes.names_here(number)
    return Rank(number, host, node, refusals_here(wanted, dtype))


def _gathered(
    wanted: str, group: dist.ProcessGroup, dtype: torch.dtype
) -> tuple[tuple[int, ...], dict[tuple[int, ...], list[Rank]]]:
    """This rank's group, by the numbers of its ranks, and what the ranks of all groups tell."""
    mine = tuple(dist.get_process_group_ranks(group))
    told = gather((mine, _here(wanted, dtype)))
    groups = sorted({numbers for numbers, _ in told})
    return mine, {numbers: [told[n][1] for n in numbers] for numbers in groups}


def _made(name: str, reason: str, ranks: Sequence[Rank]) -> Transport:
    return Transport(name, reason, class_of(name).inside(ranks))


def _refuse(name: str, ranks: Sequence[Rank]) -> Refusal:
    """Why a transport cannot serve a group."""
    return one_for_all(ranks, name) or class_of(name).refuse(ranks)


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
