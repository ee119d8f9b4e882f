"""Optional capabilities that a knob turns on: import paths, `module:name`, of their parts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicationParts:
    """Parts of expert replication, `parallel.expert_replication` above 0."""

    rule: str
    """Rule `(cfg, transport, *, world, ranks, rates) -> Transport` with options of replication
    among so many ranks, or ValueError."""
    line: str
    """`(wanted, transport) -> kernels.registry.Choice`: line of the start page, if it replicates.
    """


REPLICATION = ReplicationParts(
    rule="phalanx.extras.replication.options:replicated",
    line="phalanx.extras.replication.options:replication_line",
)


@dataclass(frozen=True)
class OverlapParts:
    """Parts of passes beside each other, `parallel.overlap_microbatches=on`."""

    gain: str
    """`(cfg, world, machine) -> effect`: estimate, with its parts and as a text. The knob's `auto`
    takes it if `effect.worthwhile` and `effect.needed`, the bytes of a rank, fit."""
    ahead: str
    """`(stage, stages, chunks) -> int`: forward passes of a stage before the first overlapped one.
    """
    passes: str  # `parallel.dispatcher.collectives.Passes`
    exchanges: str
    """`(options: SymmOptions, wanted: int | str) -> SymmOptions`, with `parallel.comm_sms`."""
    schedule: str
    """`(chunks, device) -> schedule` of a step, called like the passes of `parallel.engine`."""


OVERLAP = OverlapParts(
    gain="phalanx.extras.overlap.gain:overlap_effect",
    ahead="phalanx.extras.overlap.slots:passes_ahead",
    passes="phalanx.extras.overlap.passes:TWO_PASSES",
    exchanges="phalanx.extras.overlap.passes:two_pass_options",
    schedule="phalanx.extras.overlap.schedule:OverlappedSchedule",
)


ZERO3 = {
    "zero3": "phalanx.extras.sharded_params.setup:ShardedSetup",
    "zero3_node": "phalanx.extras.sharded_params.setup:NodeShardedSetup",
}
"""Setups of engines with sharded parameters, by values of `parallel.distributed_optimizer`."""
SHARDED_PROBLEMS = "phalanx.extras.sharded_params.problems:problems"  # `(cfg)`, of a valid kind
SHARDED_WEIGHTS = "phalanx.extras.sharded_params.estimate:sharded"  # `(cfg, world, whole, chunks)`
SHARDED_LINE = "phalanx.extras.sharded_params.estimate:line"  # `(cfg, world) -> str`


@dataclass(frozen=True)
class ContextExchange:
    """Exchange of ranks that share sequences, for core attention."""

    layer: str  # `moe.model.attention.CoreAttention` of a rank
    facts: str  # an `extras.context.facts.Exchange`: rules, bytes
    whole: bool  # kernels of attention have whole sequences


_AT = "phalanx.extras.context"
CONTEXT_EXCHANGES = {
    "keys": ContextExchange(f"{_AT}.keys:GatheredKeys", f"{_AT}.facts:KEYS", whole=False),
    "heads": ContextExchange(f"{_AT}.heads:SharedHeads", f"{_AT}.facts:HEADS", whole=True),
}
"""Exchanges of core attention by name; `CHOSEN_EXCHANGE(cfg)` is the name of one."""
CHOSEN_EXCHANGE = f"{_AT}.facts:chosen"


PHASES = {
    "configurations": "phalanx.extras.phases.configurations:configurations",
    "present": "phalanx.extras.phases.walk:present",
    "again": "phalanx.extras.phases.walk:again",
    "carried": "phalanx.extras.phases.positions:carried",
    "rows": "phalanx.extras.phases.positions:rows",
}
"""Parts of phases (`run.phases`), and of a resume that reads other samples (the last two)."""

PLANNER = {
    "page": "phalanx.extras.planner.dry_run:dry_run",
    "search": "phalanx.extras.planner.search_page:search_page",
}
"""Pages of `run.dry_run` with an exit code: `(cfg, world)` of one layout, `(cfg, world, words)` of
the fastest that fit."""

RECORD_ROUTING = "phalanx.extras.recorded_routing.record:record_routing"
"""`(cfg, job, compute, batches, step) -> line`: writes `run.record_routing` after the last step."""

WIRE = "phalanx.extras.overlap.paced:paced"
"""`(group, x, *, spreads) -> context` of a collective on the slow network of PHALANX_WIRE."""

MASK_CHECK = "phalanx.extras.chat.masks:check"
"""`(corpus, cfg.data)`: DataError if the loss mask of a pair is missing, or does not fit it."""
MASKED_ROWS = "phalanx.extras.chat.masks:masked_rows"
"""`(cfg.data, data -> rows of each part, rows) -> rows` that know which labels count."""
TASKS = "phalanx.extras.tasks.entry"
"""Module with the callback of `run.tasks`, `TaskScores`, and `checkpoint_scores` of a model."""
READ_TASKS = "phalanx.extras.tasks.prepared:prepared"  # `(cfg)`, or DataError, without torch


VARIANTS = {
    "latent": "phalanx.extras.variants.facts:Latent",
    "mup": "phalanx.extras.transfer.facts:Base",
    "mup_ffn": "phalanx.extras.transfer.facts:ExpertBase",
}
"""`(size) -> extras.variants.facts.Variant` by name: changes of `model.variants`."""
RATES = ("mup:", "mup_ffn:")  # beginnings of those of which a trained model has no trace
VARIANT_PROBLEMS = "phalanx.extras.variants.facts:problems"  # `(cfg)`, which it repairs

KERNELS: tuple[str, ...] = ("phalanx.extras.replication.kernels.shipped:kernels",)
"""Paths of `() -> (kernel class, configuration), ...`: for Hopper, built ahead of time."""
