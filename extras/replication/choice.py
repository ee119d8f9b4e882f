"""Choice of expert replication for a transport, and its line of the start page."""

from collections.abc import Iterable
from dataclasses import replace

from phalanx.configs.arithmetic.accounting import mlp_weights
from phalanx.configs.formats import width
from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Rates
from phalanx.configs.tables.transports import (
    MAX_REPLICATED_EXPERTS,
    MAX_REPLICATION_RANKS,
    TRANSPORTS,
)
from phalanx.extras.replication.options import CopyCosts, ReplicationOptions, copy_costs
from phalanx.kernels.registry import Choice
from phalanx.parallel.dispatcher.transport_class import Transport


def replicated(
    cfg: Config, transport: Transport, *, world: int, ranks: int, rates: Iterable[Rates]
) -> Transport:
    """The transport with the slots of a configuration.

    Args:
        cfg: valid on `world` ranks, with resolved `parallel.dispatch`.
        transport: the chosen transport.
        world: number of ranks of the job.
        ranks: number of ranks that share experts.
        rates: rates of all devices, of which the slowest count.

    Raises:
        ValueError: the transport cannot replicate, or the group is too large.
    """
    keep, weights = cfg.parallel.save_x == "keep", mlp_weights(cfg.model, cfg.model.moe.ffn)
    costs = max(copy_costs(r, weights=weights, width=width(cfg), keep=keep) for r in rates)
    return with_replication(
        cfg.parallel.expert_replication,
        transport,
        ranks=ranks,
        local=cfg.model.moe.experts // expert_parallel_size(cfg, world),
        costs=costs,
        keep=keep,
    )


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


def replication_line(wanted: int | str, transport: Transport) -> Choice:
    """Line of `kernels.registry.table` on a transport that replicates experts."""
    options = (transport.inside or transport).replication
    assert isinstance(options, ReplicationOptions)
    kept = "saved for" if options.keep else "resent in"
    where = "; in each node by itself" if transport.inside else ""
    reason = f"parallel.expert_replication={wanted}{where}; {options.cost_text}; weights are {kept}"
    slots = f"{options.slots} slot{'s' * (options.slots > 1)}"
    return Choice("replication", slots, f"{reason} the backward pass")
