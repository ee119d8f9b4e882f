"""Program of a rank: `hier` over nodes of one GPU each against `alltoall`, bit for bit.

    torchrun --nproc-per-node 2 tests/extras/between_nodes/rail_layer.py

All rows travel over the rail, by a collective, captured in a CUDA
graph, forward and backward. It prints what was compared, and raises at the first difference. A rank
that hangs ends after LIMIT seconds.
"""

import faulthandler
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from phalanx.parallel import runtime
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher import nodes
from phalanx.parallel.dispatcher.capacity import Budget, Capacity
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport_class import Transport
from tests.parallel.dispatcher.gpu_ranks import join
from tests.parallel.dispatcher.symm_layer import SPECS, Layer, Way, captured, compare, routed

LIMIT = 50
SHAPE = (256, 128, 128, 8, 2)
"""Tokens of a rank, hidden, width, experts, top-k."""
REPLAYS, COMPARED = 1000, 100
BLOCKS = 1.2
"""Rows of a block over the balanced load: 242 of 256 for SHAPE on two nodes."""


def over_nodes_of_one() -> Transport:
    """The transport `hier` on nodes of one rank each, which no run chooses."""
    ranks = range(dist.get_world_size())
    joined = nodes.join({tuple(ranks): [str(rank) for rank in ranks]})
    return Transport("hier", "a test", inside=Transport("alltoall", "a test"), nodes=joined)


def pair(precision: str, connections: Connections) -> tuple[Layer, Layer, Budget]:
    """A layer over nodes with small blocks, the same by collectives, and the budget of the first.

    The first call of either layer has not been made yet.
    """
    budget = Budget(64.0, torch.device("cuda"))
    budget.blocks = Capacity(BLOCKS, torch.device("cuda"))
    options = SymmOptions(timeout=20)
    given = SHAPE, SHAPE[-1], options, SPECS[precision]
    ours = Layer(Way(over_nodes_of_one(), True, connections), *given, budget=budget)
    theirs = Layer(Way(Transport("alltoall", "a test"), True, connections), *given)
    return ours, theirs, budget


def draw(kind: str, layers: tuple[Layer, Layer], g: torch.Generator) -> None:
    """New routing and tokens for both layers, in the memory that graphs read."""
    idx = routed(kind, SHAPE[0], SHAPE[3], SHAPE[4], g)
    x = torch.randn(SHAPE[:2], generator=g, device="cuda").bfloat16()
    with torch.no_grad():
        for layer in layers:
            layer.idx.copy_(idx)
            layer.x.copy_(x)


def fits(budget: Budget) -> bool:
    return not budget.exceeded(budget.record(dist.group.WORLD).tolist())


def said(text: str) -> None:
    if dist.get_rank() == 0:
        print("equal:", text, flush=True)


def replays(precision: str, connections: Connections) -> None:
    """Many replays with other routing each time; every third has a rank that sends nothing."""
    ours, theirs, budget = pair(precision, connections)
    g = torch.Generator("cuda").manual_seed(100 + dist.get_rank())
    draw("random", (ours, theirs), g)
    graph = captured(lambda: ours(False), connections)
    compared = 0
    for turn in range(1, REPLAYS + 1):
        draw("none here" if turn % 3 == 0 else "random", (ours, theirs), g)
        results = graph()
        if turn % COMPARED == 0:
            compare(results, theirs(False), f"{precision}, replay {turn}")
            compared += 1
    assert fits(budget), "a block was too small"
    said(f"{compared} of {REPLAYS} replays in {precision}")


def overflow(precision: str, connections: Connections) -> None:
    """A replay whose blocks are too small raises the flag, and fits when it is run again."""
    ours, theirs, budget = pair(precision, connections)
    g = torch.Generator("cuda").manual_seed(7 + dist.get_rank())
    draw("random", (ours, theirs), g)
    graph = captured(lambda: ours(False), connections)
    compare(graph(), theirs(False), f"{precision}, before the overflow")
    assert fits(budget), "a block was too small for random routing"
    draw("one rank", (ours, theirs), g)
    graph()
    assert not fits(budget), "no flag for blocks that are too small"
    (grown,) = budget.grow()
    assert grown.between_nodes and grown.factor > grown.needed > BLOCKS
    graph = captured(lambda: ours(False), connections)
    compare(graph(), theirs(False), f"{precision}, after the overflow")
    assert fits(budget), "a block was too small when run again"
    said(f"a rerun after an overflow in {precision}")


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    here = join()
    for precision in SPECS:
        replays(precision, here.connections)
        overflow(precision, here.connections)
    torch.cuda.synchronize()
    dist.barrier()
    runtime.stop(here)


if __name__ == "__main__":
    main()
