"""Engines of the rail by name: the values of `parallel.rail`."""

import torch.distributed as dist

from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.rail.collective import CollectiveRail, Rail
from phalanx.parallel.dispatcher.rail.gin import GinRail


def rail_of(
    options: SymmOptions, group: dist.ProcessGroup, connections: Connections | None
) -> Rail:
    """The rail of a group, by the engine of `options`; collective over the group.

    Args:
        options: engine, and timeout of its waits.
        group: the ranks of the rail, in the order of nodes.
        connections: memory that this process shares with others, which `gin` needs.

    Raises:
        ValueError: the engine cannot run here.
    """
    if options.rail == "collective":
        return CollectiveRail(group)
    assert connections is not None
    return GinRail(group, connections, options.limit_ms)
