"""Optional capabilities that a knob turns on: where their parts are.

Paths are import paths, `module:name`, so that a run which does not use a capability does not import
it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicationParts:
    """Parts of expert replication, `parallel.expert_replication` above 0.

    The transports that replicate are in `configs.tables.transports`.
    """

    rule: str
    """Planner rule `(cfg, transport, *, world, ranks, rates) -> Transport`, which gives a transport
    options of replication among so many ranks. Raises ValueError if it cannot replicate."""
    line: str
    """`(wanted, transport) -> kernels.registry.Choice`: line of the start page on a transport that
    replicates."""


REPLICATION = ReplicationParts(
    rule="phalanx.extras.replication.choice:replicated",
    line="phalanx.extras.replication.choice:replication_line",
)
