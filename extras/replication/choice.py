"""Choice of expert replication for a transport, and its line of the start page."""

from dataclasses import replace

from phalanx.configs.tables.transports import (
    MAX_REPLICATED_EXPERTS,
    MAX_REPLICATION_RANKS,
    TRANSPORTS,
)
from phalanx.extras.replication.options import CopyCosts, ReplicationOptions
from phalanx.kernels.registry import Choice
from phalanx.parallel.dispatcher.transport import LOCAL, class_of
from phalanx.parallel.dispatcher.transport_class import Transport


def with_replication(
    wanted: int | str, transport: Transport, *, ranks: int, local: int, costs: CopyCosts, keep: bool
) -> Transport:
    """The transport with `parallel.expert_replication`.

    Args:
        wanted: a number of slots, or `auto`.
        transport: the chosen transport.
        ranks: number of ranks that share experts: of the group, or of each node with a transport
            inside nodes.
        local: number of experts of each rank.
        costs: costs of copies.
        keep: True if weights of replicas are saved for the backward pass.

    Raises:
        ValueError: the transport cannot replicate, or the group is too large.
    """
    facts = TRANSPORTS.get(transport.name)
    if wanted in (0, "auto") or ranks == 1:
        return transport
    if facts is None or not facts.replicates_experts:
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
    """Line of `kernels.registry.table` on expert replication, unless it is 0."""
    if wanted == 0:
        return []
    within = transport.inside or transport
    if (options := within.replication) is not None:
        kept = "saved for" if options.keep else "resent in"
        where = "; in each node by itself" if transport.inside else ""
        reason = (
            f"parallel.expert_replication={wanted}{where}; {options.cost_text}; weights are {kept}"
        )
        slots = f"{options.slots} slot{'s' * (options.slots > 1)}"
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
        reason = f"{within.name} does not hide the exchange of replicas"
    else:
        reason = "replicas cost a step more than they save where ranks are nearly even"
    return [Choice("replication", "off", f"auto; {reason}")]
