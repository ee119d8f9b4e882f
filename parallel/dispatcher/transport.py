"""Choice of the transport of an expert-parallel group, the same on all of its ranks, with reasons.

Before layers are built, every rank gathers the facts of all ranks and decides by the same rules:
what one rank cannot do, its group does not do.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pkgutil import resolve_name

import torch
import torch.distributed as dist

from phalanx.configs.schema import ParallelConfig
from phalanx.configs.tables.transports import AUTO_SMS, TRANSPORTS
from phalanx.kernels.limits import Refusal
from phalanx.kernels.registry import Choice
from phalanx.parallel.dispatcher import nodes
from phalanx.parallel.dispatcher.collectives import IN_TURN, Passes
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport_class import (
    DispatchContext,
    Dispatcher,
    LoadCounts,
    Rank,
    Transport,
    refusal_of_any_rank,
    waits_for_tokens,
)
from phalanx.parallel.fault.agreement import gather

LOCAL = Transport("local", "all experts are on one rank")


def class_of(name: str) -> type[Dispatcher]:
    """The class that an entry of `configs.tables.transports` names."""
    return _class_at(TRANSPORTS[name].implementation)


@functools.cache  # an estimate asks a hundred times
def _class_at(path: str) -> type[Dispatcher]:
    transport: type[Dispatcher] = resolve_name(path)
    return transport


def build(context: DispatchContext) -> Dispatcher:
    """The dispatcher of one MoE layer, with expert replication if that was chosen."""
    chosen = context.transport
    if chosen.replication is None:
        return class_of(chosen.name).build(context)
    return _replicated(chosen).build(context)


def load_counts(transports: Sequence[Transport]) -> LoadCounts | None:
    """Counts of the transports of a job in the load statistics of layers; None: there are none."""
    for chosen in transports:
        within = chosen.inside or chosen
        if within.replication is not None:
            return _replicated(within).load_counts
    return None


def _replicated(chosen: Transport) -> type[Dispatcher]:
    replicated: type[Dispatcher] = resolve_name(TRANSPORTS[chosen.name].replicated)
    return replicated


def own_exchange(backend: str, wanted: str) -> Transport:
    """The transport of a backend with its own dispatcher, whatever is `wanted`."""
    asked = "" if wanted == "auto" else f"; parallel.dispatch={wanted} is not in effect"
    return Transport(backend, f"kernels.backend={backend} has its own{asked}")


def choose_transport(wanted: str, group: dist.ProcessGroup | None, dtype: torch.dtype) -> Transport:
    """The transport of this rank's group; collective over the job.

    Args:
        wanted: key of `configs.tables.transports`, or `auto`: `local` on one rank, else the first
            of the table that `auto` may take and that can run.
        group: this rank's expert-parallel group; None is one rank.
        dtype: dtype of the tokens.

    Raises:
        ValueError: on all ranks of the job, with what to set: an unknown name, or a transport that
            cannot serve one of the groups.
    """
    if group is None or group.size() == 1:  # as all groups of the job are
        alone = resolve(wanted, [_this_rank(wanted, dtype)])
        if group is None and not TRANSPORTS[alone.name].one_rank:
            raise ValueError(
                f"parallel.dispatch={wanted} needs an expert-parallel process group: "
                f"set parallel.dispatch={LOCAL.name}"
            )
        return alone
    mine, ranks = _gathered(wanted, group, dtype)
    by_group = {numbers: resolve(wanted, members) for numbers, members in ranks.items()}
    chosen = by_group[mine]
    chosen = replace(chosen, reason=chosen.reason + other_groups(by_group, mine))
    over_nodes = [numbers for numbers, taken in by_group.items() if taken.inside is not None]
    # All ranks of the job create the process groups of all groups.
    joined = nodes.join({n: [rank.node for rank in ranks[n]] for n in over_nodes})
    return replace(chosen, nodes=joined) if chosen.inside is not None else chosen


def refuse(name: str, group: dist.ProcessGroup, dtype: torch.dtype) -> Refusal:
    """Reason that a transport cannot serve the groups, or None; collective over the job."""
    _, ranks = _gathered(name, group, dtype)
    return next((text for members in ranks.values() if (text := _refuse(name, members))), None)


def refusals_here(wanted: str, dtype: torch.dtype) -> dict[str, Refusal]:
    """Reasons that this rank cannot serve, or None, by the names of the transports in question."""
    names = [name for name, facts in TRANSPORTS.items() if wanted in ("auto", name)]
    asked = [name for name in names if wanted != "auto" or TRANSPORTS[name].auto]
    asked += [inside for name in asked for inside in TRANSPORTS[name].inside]
    return {name: _refuses_here(name, dtype) for name in dict.fromkeys(asked)}


def _refuses_here(name: str, dtype: torch.dtype) -> Refusal:
    return None if TRANSPORTS[name].over_nodes else class_of(name).refuse_here(dtype)


def refuse_dtype(name: str, dtype: torch.dtype) -> Refusal:
    """Reason that a transport cannot move tokens of a dtype on any machine, or None."""
    return None if TRANSPORTS[name].over_nodes else class_of(name).refuse_dtype(dtype)


def resolve(wanted: str, ranks: Sequence[Rank]) -> Transport:
    """The transport of one group, from the facts of its ranks, or ValueError for `wanted`."""
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
    if reason := _refuse(wanted, ranks):
        # A job has several groups, so that what is true of one need not be true of the job.
        size, first = len(ranks), ranks[0].number
        where = f" in the group of {size} ranks from rank {first}" if size > 1 else ""
        raise ValueError(
            f"parallel.dispatch={wanted} cannot run{where}: {reason}; set parallel.dispatch=auto"
        )
    return _transport(wanted, f"parallel.dispatch={wanted}", ranks)


def _best(ranks: Sequence[Rank]) -> Transport:
    """The first transport of the table that `auto` may take and that can run."""
    if len(ranks) == 1:
        return replace(LOCAL, reason=f"auto; {LOCAL.reason}")
    reason = "auto"
    for name, facts in TRANSPORTS.items():
        if not facts.auto or facts.one_rank:
            continue
        refusal = _refuse(name, ranks)
        if not refusal:
            return _transport(name, reason, ranks)
        reason += f"; not {name}: {refusal}"
    raise AssertionError("no transport runs everywhere")


def connect(
    transports: Sequence[Transport],
    node_names: Sequence[str],
    group: dist.ProcessGroup,
    passes: Passes = IN_TURN,
) -> Transport:
    """This rank's transport with the process groups that it needs. Collective over the job.

    Args:
        transports: transport of each group, of consecutive ranks, without process groups.
        node_names: name of the node of each rank of the job.
        passes: what forward and backward passes exchange by.
    """
    size = len(node_names) // len(transports)
    members = [tuple(range(i * size, (i + 1) * size)) for i in range(len(transports))]
    over_nodes = [ranks for ranks, t in zip(members, transports, strict=True) if t.inside]
    # All ranks of the job create the process groups of all groups.
    joined = nodes.join({ranks: [node_names[i] for i in ranks] for ranks in over_nodes})
    mine = transports[dist.get_rank() // size]
    if mine.inside is not None:
        mine = replace(mine, nodes=joined)
    return _beside(mine, group, passes) if passes.beside else mine


def _beside(transport: Transport, group: dist.ProcessGroup, passes: Passes) -> Transport:
    """The transport for passes beside each other, with process groups; collective over the job."""
    if transport.name not in TRANSPORTS:
        return transport
    inside, joined = transport.inside, transport.nodes
    if inside is not None and joined is not None:
        inside, group = _beside(inside, joined.inside, passes), joined.rail
    collective = TRANSPORTS[transport.name].collective
    groups = passes.groups(group) if collective else None
    return replace(transport, passes=passes, inside=inside, group=groups)


def sms_of(wanted: int | str, transport: Transport, backend: str, quantizes: bool = False) -> int:
    """Number of SMs of exchanges: the value of `parallel.comm_sms`, or the choice of `auto`.

    `quantizes`: the experts quantise tokens that arrive in bf16.
    """
    if isinstance(wanted, int):
        return wanted
    within = (transport.inside or transport).name
    pushes = within in TRANSPORTS and class_of(within).no_overlap is None
    return AUTO_SMS if pushes and waits_for_tokens(backend, quantizes) else 0


def exchange_options(
    parallel: ParallelConfig, transport: Transport, backend: str, quantizes: bool = False
) -> SymmOptions:
    """Options of exchanges without `auto`; arguments are those of `sms_of` and `choices`."""
    return SymmOptions(
        comm_sms=sms_of(parallel.comm_sms, transport, backend, quantizes),
        # Shorter than the watchdog's, which does not know for which rank a kernel waits.
        timeout=0.8 * parallel.timeout,
        keep=parallel.save_x == "keep",
    )


def choices(
    transport: Transport,
    parallel: ParallelConfig,
    *,
    backend: str,
    shared: bool,
    quantizes: bool = False,
    two_passes: bool = False,
) -> list[Choice]:
    """Lines of `kernels.registry.table` on the transport and its overlap.

    `shared`: layers have shared experts; `quantizes` as in `sms_of`; `two_passes`: those of two
    micro-batches run beside each other.
    """
    lines = [Choice("transport", transport.name, transport.reason)]
    if transport.inside is not None:
        lines.append(Choice("- in a node", transport.inside.name, transport.inside.reason))
    wanted = parallel.comm_sms
    sms = sms_of(wanted, transport, backend, quantizes)
    refusal = None
    if not waits_for_tokens(backend):
        refusal = f"{backend} experts cannot wait for tokens"
    elif quantizes:
        refusal = "experts quantise tokens once all have arrived (precision.dispatch=bf16)"
    if two_passes:
        sms, refusal = 0, "exchanges overlap another micro-batch"
    asked = "auto" if wanted == "auto" else f"parallel.comm_sms={wanted}"
    return [*lines, _overlap(transport, sms, asked, refusal, shared)]


def replication_off(wanted: int | str, transport: Transport) -> Choice:
    """Line of `kernels.registry.table` on a transport without the knob's expert replication."""
    facts = TRANSPORTS.get(transport.name, TRANSPORTS[LOCAL.name])
    within = (transport.inside or transport).name
    if facts.one_rank:
        reason = f"all experts are on one rank; parallel.expert_replication={wanted}"
    elif not facts.replicates_experts:
        reason = f"auto; {transport.name} cannot replicate experts"
    elif class_of(within).no_overlap is not None:
        reason = f"auto; {within} does not hide the exchange of replicas"
    else:
        reason = "auto; replicas cost a step more than they save where ranks are nearly even"
    return Choice("replication", "off", reason)


_MEGATRON_WAITS = "Megatron-Core's layer waits for its exchanges"


def _overlap(
    transport: Transport, sms: int, asked: str, cannot: str | None, shared: bool
) -> Choice:
    """Line on the overlap of exchanges with experts, with the reason that there is no more.

    Args:
        sms: number of SMs that exchange, requested by the setting `asked`.
        cannot: reason that the experts cannot start with the tokens that have arrived, or None.
        shared: layers have shared experts.
    """
    name = (transport.inside or transport).name
    facts = TRANSPORTS.get(name)
    no_overlap = class_of(name).no_overlap if facts else _MEGATRON_WAITS
    refusal = no_overlap or cannot
    if sms and no_overlap is None and (shared or refusal is None):
        reason = f"{asked}; with the shared experts only: {refusal}" if refusal else asked
        if transport.inside is not None:
            beside = "beside the shared experts" if shared else "exposed"
            reason += f"; inside nodes only: the exchange between nodes is {beside}"
        return Choice("overlap", f"{sms} SMs", reason)
    if sms:
        used = no_overlap is not None and facts is not None and facts.takes_sms
        effect = "sets the SMs of its kernels" if used else "is not in effect"
        return Choice("overlap", "off", f"{refusal}; {asked} {effect}")
    return Choice("overlap", "off", refusal or asked)


def _this_rank(wanted: str, dtype: torch.dtype) -> Rank:
    number = dist.get_rank() if dist.is_initialized() else 0
    host, node = nodes.names_here(number)
    return Rank(number, host, node, refusals_here(wanted, dtype))


def _gathered(
    wanted: str, group: dist.ProcessGroup, dtype: torch.dtype
) -> tuple[tuple[int, ...], dict[tuple[int, ...], list[Rank]]]:
    """This rank's group, by the numbers of its ranks, and the facts of the ranks of all groups."""
    mine = tuple(dist.get_process_group_ranks(group))
    facts = gather((mine, _this_rank(wanted, dtype)))
    groups = sorted({numbers for numbers, _ in facts})
    return mine, {numbers: [facts[n][1] for n in numbers] for numbers in groups}


def _transport(name: str, reason: str, ranks: Sequence[Rank]) -> Transport:
    return Transport(name, reason, _inside(TRANSPORTS[name].inside, ranks))


def _inside(names: Sequence[str], ranks: Sequence[Rank]) -> Transport | None:
    """The first of the transports inside a node that all nodes can run; None if there is none."""
    reason, on_nodes = "auto", dict[str, list[Rank]]()
    for rank in ranks:
        on_nodes.setdefault(rank.node, []).append(rank)
    for name in names:
        refusals = (class_of(name).refuse(members) for members in on_nodes.values())
        refusal = refusal_of_any_rank(ranks, name) or next(filter(None, refusals), None)
        if not refusal:
            return Transport(name, reason)
        reason += f"; not {name}: {refusal}"
    return None


def _refuse(name: str, ranks: Sequence[Rank]) -> Refusal:
    if refusal := refusal_of_any_rank(ranks, name):
        return refusal
    if TRANSPORTS[name].over_nodes:
        return nodes.refuse([rank.node for rank in ranks])
    return class_of(name).refuse(ranks)


def other_groups(by_group: dict[tuple[int, ...], Transport], mine: tuple[int, ...]) -> str:
    """Clause on the groups that take another transport than this one."""

    def name(transport: Transport) -> str:
        inside = transport.inside
        return transport.name + (f" with {inside.name} in a node" if inside else "")

    others = {n: t for n, t in by_group.items() if name(t) != name(by_group[mine])}
    if not others:
        return ""
    numbers, first = next(iter(others.items()))
    reason = (first.inside or first).reason.removeprefix("auto; ").replace("; ", ", ")
    return (
        f"; {len(others)} of {len(by_group)} groups differ: that of rank {numbers[0]} takes "
        f"{name(first)} ({reason})"
    )
