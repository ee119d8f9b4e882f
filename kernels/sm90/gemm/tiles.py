"""Choice of a grouped GEMM's tile for a shape.

`tiles.json` has the measured time of each tile, for each kind of GEMM, relative to the fastest and
for a number of columns that all divide; `scripts/lab/bench_kernels.py --tune` measures and rewrites
it. The rest is arithmetic: columns are padded to whole tiles.
"""

import functools
import json
from pathlib import Path

from phalanx.kernels.sm90.gemm.mainloop import Mainloop

TILES = {
    "pp128": Mainloop(128, pingpong=True),
    "pp192": Mainloop(192, pingpong=True),
    "co256": Mainloop(256),
}
"""Tiles by name: ping-pong (pp) or cooperative (co), and columns of accumulators."""
PATH = Path(__file__).with_name("tiles.json")
DEEP = 4096  # channels of the contraction from which gathered loads bound a tile


def kind(name: str, *, gather: bool, depth: int) -> str:
    """Entry of the table for a kernel and a contraction of `depth` channels."""
    if not gather:
        return name
    return f"{name} gathered, deep" if depth >= DEEP else f"{name} gathered"


@functools.cache
def table() -> dict[str, dict[str, float]]:
    """Relative time of each tile, by kind."""
    return json.loads(PATH.read_text())


@functools.cache
def choose(
    name: str,
    columns: int,
    depth: int,
    *,
    transposed: bool,
    gather: bool = False,
    num_gate_parts: int = 1,
) -> Mainloop:
    """The fastest tile of `grouped_gemm`, `fc1_act` or `fc2_dgrad_dact`.

    Args:
        columns: of the output. depth: channels of the contraction.
        transposed: B is stored [L, K, N]. gather: rows of A are picked by an index.
        num_gate_parts: accumulators of an output element, 2 with a gate.
    """

    def cost(tile: str) -> float:
        wide = TILES[tile].columns // num_gate_parts
        return relative[tile] * (-(-columns // wide) * wide)

    relative = table()[kind(name, gather=gather, depth=depth)]
    return configured(min(relative, key=cost), gather=gather, transposed=transposed)


def configured(tile: str, *, transposed: bool, gather: bool = False) -> Mainloop:
    """Main loop of a tile of TILES for these operands."""
    shape = TILES[tile]
    return Mainloop(shape.columns, shape.pingpong, b_transposed=transposed, gather=gather)
