"""`--tune`: time every tile of a grouped GEMM, relative to the fastest, into `tiles.json`.

Each kind of the table is measured on shapes whose columns all tiles divide. Tiles that an entry
does not list are not measured: they do not compile for it, or spill registers.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.gemm import tiles
from phalanx.scripts.lab.bench.problems import SWIGLU, dirichlet, index_of, offsets_of, random
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.timing import Bench, Case

Table = Mapping[str, Mapping[str, float]]


class Problem(NamedTuple):
    """Rows, columns of the output, depth of the contraction, experts."""

    S: int
    N: int
    K: int
    L: int


DEEP = (Problem(32768, 2304, 4608, 16), Problem(32768, 1536, 7168, 32))
SHALLOW = (
    Problem(65536, 2304, 768, 16),
    Problem(65536, 1536, 2048, 16),
    Problem(32768, 3072, 3072, 8),
)
CASES = (*SHALLOW, DEEP[0])  # shapes of kinds that do not distinguish deep from shallow


def cases_of(kind: str) -> tuple[Problem, ...]:
    if "gathered" not in kind:
        return CASES
    return DEEP if "deep" in kind else SHALLOW


def relative(measured: Mapping[str, list[float]]) -> dict[str, float]:
    """Median over the shapes of each tile's milliseconds relative to the fastest, fastest first."""
    fastest = [min(times) for times in zip(*measured.values(), strict=True)]
    share = {
        tile: median(t / f for t, f in zip(times, fastest, strict=True))
        for tile, times in measured.items()
    }
    least = min(share.values())
    return {tile: round(share[tile] / least, 2) for tile in sorted(share, key=lambda t: share[t])}


def to_text(table: Table) -> str:
    lines = [f"  {json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def changes(old: Table, new: Table) -> list[str]:
    """A line for each kind with the old and the new entry."""
    out = []
    for kind, entry in old.items():
        new_entry = new.get(kind, entry)
        change = "unchanged" if dict(entry) == dict(new_entry) else f"now {json.dumps(new_entry)}"
        out.append(f"  {kind:<32} {json.dumps(dict(entry))} {change}")
    return out


def update(path: Path, new: Table) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(to_text(new))
    temporary.replace(path)


def calls(bench: Bench, name: str, case: Problem, gather: bool) -> Iterator[tuple[str, Callable]]:
    """The kernel with each weight layout that it supports, as functions of the tile's name."""
    S, N, K, L = case
    device, counts = bench.clock.device, dirichlet(S, L)
    offsets, T = offsets_of(counts, device), max(S // 8, *counts)
    index = index_of(counts, T, device) if gather else None
    torch.manual_seed(0)
    a = random(T if gather else S, K, device=device)
    args: dict[str, Any] = dict(index_S=index, prob_S=torch.rand(S, device=device))

    def loop(tile: str, transposed: bool) -> tiles.Mainloop:
        return tiles.configured(tile, gather=gather, transposed=transposed)

    match name:
        case "grouped_gemm":
            y = torch.empty(S, N, dtype=a.dtype, device=device)
            for transposed, shape in ((False, (N, K)), (True, (K, N))):
                w = random(L, *shape, device=device, scale=K**-0.5)
                w = w.mT if transposed else w
                yield (
                    "[L, K, N]" if transposed else "[L, N, K]",
                    lambda tile, w=w, t=transposed: grouped_gemm(
                        a, w, offsets, out_SN=y, loop=loop(tile, t)
                    ),
                )
        case "fc1_act":
            w1 = random(L, 2 * N, K, device=device, scale=K**-0.5)
            yield (
                "",
                lambda tile: fc1_act(a, w1, offsets, SWIGLU, **args, loop=loop(tile, False)),
            )
        case "fc2_dgrad_dact":
            w2 = random(L, K, N, device=device, scale=K**-0.5)
            h = random(S, 2 * N, device=device)
            yield (
                "",
                lambda tile: fc2_dgrad_dact(
                    a, w2.mT, h, offsets, SWIGLU, **args, loop=loop(tile, True)
                ),
            )
        case _:
            raise ValueError(f"{tiles.PATH.name} has a kind that --tune cannot measure: {name}")


def kind(bench: Bench, entry: str) -> tuple[list[Record], dict[str, float]]:
    """Measure an entry of the table; returns records and relative times (empty if a tile fails)."""
    name, gather = entry.split(" ")[0], "gathered" in entry
    listed = [tile for tile in tiles.table()[entry] if tile in tiles.TILES]
    measured: dict[str, list[float]] = {tile: [] for tile in listed}
    records: list[Record] = []
    for case in cases_of(entry):
        for layout, call in calls(bench, name, case, gather):
            timings, what = bench.timings("tune", case), f"{entry} {layout}".strip()
            flops = (4 if name == "fc1_act" else 2) * case.S * case.N * case.K
            sides = [Case(tile, what, partial(call, tile), flops) for tile in listed]
            records += timings.measure(sides)
            for tile in listed:
                if time := timings.time(tile, what):
                    measured[tile].append(time.ms)
        bench.clock.free()
    complete = len({len(times) for times in measured.values()}) == 1 and all(measured.values())
    return records, relative(measured) if complete else {}
