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


@dataclass(frozen=True)
class OverlapParts:
    """Parts of passes of two micro-batches beside each other, `parallel.overlap_microbatches=on`.

    The transports that allow it are in `configs.tables.transports`.
    """

    gain: str
    """`(cfg, world, machine) -> effect`: estimated effect, with its parts and as a text. The knob's
    `auto` takes it if `effect.worthwhile` and `effect.needed`, the bytes of a rank, fit."""
    ahead: str
    """`(stage, stages, chunks) -> int`: number of forward passes of a pipeline stage before the one
    beside its first backward pass."""
    passes: str  # `parallel.dispatcher.collectives.Passes`
    exchanges: str
    """`(options: SymmOptions, wanted: int | str) -> SymmOptions`: options of exchanges, from those
    of passes in turn and `parallel.comm_sms`."""
    schedule: str
    """`(chunks, device) -> schedule` of the micro-batches of a step, to be called like the forward
    and backward passes of `parallel.engine`."""


OVERLAP = OverlapParts(
    gain="phalanx.extras.overlap.gain:overlap_effect",
    ahead="phalanx.extras.overlap.slots:passes_ahead",
    passes="phalanx.extras.overlap.passes:TWO_PASSES",
    exchanges="phalanx.extras.overlap.passes:two_pass_options",
    schedule="phalanx.extras.overlap.schedule:OverlappedSchedule",
)

WIRE = "phalanx.extras.overlap.paced:paced"
"""`(group, x, *, spreads) -> context` of a collective on the slow network of PHALANX_WIRE."""

KERNELS: tuple[str, ...] = ("phalanx.extras.replication.kernels.shipped:kernels",)
"""Paths of `() -> (kernel class, configuration), ...`: kernels for Hopper that are built ahead of
time with those of `kernels.sm90.jit.shipped`."""
