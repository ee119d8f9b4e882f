"""Engines of the rail by name: the values of `parallel.rail`."""

from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.passes.pass_groups import PassGroups, Ranks
from phalanx.parallel.dispatcher.rail.collective import CollectiveRail, Rail
from phalanx.parallel.dispatcher.rail.gin import GinRail


def rail_of(options: SymmOptions, ranks: Ranks, connections: Connections | None) -> Rail:
    """The rail of a group, by the engine of `options`; collective over the group.

    Args:
        options: engine, and timeout of its waits.
        ranks: those of the rail, in the order of nodes; or groups of them for both passes, which
            only `collective` takes.
        connections: memory that this process shares with others, which `gin` needs.

    Raises:
        ValueError: the engine cannot run here.
    """
    if options.rail == "collective":
        return CollectiveRail(ranks)
    assert connections is not None and not isinstance(ranks, PassGroups)
    return GinRail(ranks, connections, options.limit_ms)
