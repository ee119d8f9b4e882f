"""Functions that the core calls by name (`configs.tables.optimizers.HOST_STATES`)."""

from typing import Any

from phalanx.extras.host_states.estimate import (
    check_hosts,
    lines,
    placement,
    seconds,
    slot_bytes,
)

__all__ = ["check_hosts", "hosted", "lines", "placement", "seconds", "slot_bytes"]


def hosted(setup: Any, room: int) -> Any:
    """See `extras.host_states.optimizer`, which imports Megatron-Core."""
    from phalanx.extras.host_states.optimizer import hosted

    return hosted(setup, room)
