"""Can a forward pass run beside the backward pass of another micro-batch? One answer for all.

`validate` asks for a forced `parallel.overlap_microbatches`, the start of a run and the dry run for
what `auto` comes to, with kernels and transport resolved by then.
"""

from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.transports import TRANSPORTS


def not_overlappable(cfg: Config) -> str | None:
    """Reason that micro-batches cannot overlap, or None.

    Args:
        cfg: an `auto` of kernels or transport that is not resolved yet refuses nothing.
    """
    p, transport = cfg.parallel, TRANSPORTS.get(cfg.parallel.dispatch)
    if expert_backend(cfg.kernels.backend).stock_layer:
        return f"kernels.backend={cfg.kernels.backend} has its own exchanges"
    if transport is not None and transport.one_rank:
        return "all experts are on one rank, which exchanges nothing"
    if transport is not None and not transport.overlaps_microbatches:
        return f"kernels of parallel.dispatch={p.dispatch} fill the GPU and wait for other ranks"
    if p.pipeline > 1:
        return f"parallel.pipeline={p.pipeline} has a schedule of its own"
    for knob in ("tensor", "context"):
        if getattr(p, knob) > 1:
            return f"parallel.{knob}={getattr(p, knob)} has one communicator for both passes"
    if p.expert_replication not in (0, "auto"):
        return f"parallel.expert_replication={p.expert_replication} has one communicator for both"
    if cfg.run.offload:
        return "run.offload has host buffers for one micro-batch"
    return None


def forced_overlap_error(reason: str) -> str:
    """The message where overlap is forced and cannot be."""
    return (
        f"parallel.overlap_microbatches=on cannot run: {reason}; "
        "set parallel.overlap_microbatches=auto"
    )
