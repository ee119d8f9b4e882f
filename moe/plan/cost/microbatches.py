"""Reasons that keep `parallel.overlap_microbatches` off without an estimate of its gain."""

from phalanx.configs.layout import forced_overlap_error, micro_batches, not_overlappable
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError


def reason_in_turn(cfg: Config, world: int) -> str | None:
    """Reason that micro-batches follow one another, as a clause; None: an estimate decides.

    Args:
        cfg: valid on `world` ranks, without `auto` in kernels, transport and device.
        world: ranks.

    Raises:
        ConfigError: `on` is forced and cannot run.
    """
    wanted = cfg.parallel.overlap_microbatches
    if wanted == "off":
        return ""
    if reason := not_overlappable(cfg):
        if wanted == "on":
            raise ConfigError(forced_overlap_error(reason))
        return reason
    return _left_by_auto(cfg, world) if wanted == "auto" else None


def _left_by_auto(cfg: Config, world: int) -> str | None:
    """Reason for which `auto` leaves it, whatever the estimate says; None if there is none."""
    if cfg.run.device == "cpu":
        return "a CPU computes one pass at a time"
    if expert_backend(cfg.kernels.backend).host_counts:
        return f"{cfg.kernels.backend} experts have the host wait for each pass"
    facts = TRANSPORTS[cfg.parallel.dispatch]
    if facts.one_rank:
        return "all experts are on one rank, which exchanges nothing"
    if not facts.collective:
        return f"{cfg.parallel.dispatch} overlaps its exchanges with experts"
    if micro_batches(cfg, world) == 1:
        return "a step has one micro-batch"
    return None
