"""Table of a check for a terminal, and the same as values for JSON."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from phalanx.configs.knobs import pluralize
from phalanx.scripts.cluster.findings import Expected, rate
from phalanx.scripts.cluster.results import Cluster, Rank

_MOST_ROWS = 64  # ranks up to which each has a row; of more, the slowest of each node has one

_COLUMNS: dict[str, Callable[[Rank], str]] = {
    "rank": lambda r: str(r.rank),
    "host": lambda r: r.host,
    "node": lambda r: r.node if r.node != r.host else "",
    "device": lambda r: r.gpu.name,
    "driver": lambda r: r.gpu.driver,
    "MHz (highest)": lambda r: _of(r.gpu.clock_mhz, r.gpu.highest_mhz),
    "C": lambda r: _number(r.gpu.celsius),
    "W": lambda r: _number(r.gpu.watts),
    "TFLOP/s": lambda r: rate(r.tflops),
    "peers": lambda r: f"{r.gpu.peers}/{r.gpu.visible - 1}" if r.gpu.visible else "",
    "symmetric memory": lambda r: r.symmetric_memory,
    "node GB/s": lambda r: "" if r.node_gbs is None else rate(r.node_gbs),
}


def text(cluster: Cluster, expected: Expected, found: list[str]) -> str:
    """Table of ranks without empty columns, lines of the links and clocks, and the findings."""
    ranks = cluster.ranks
    if len(ranks) > _MOST_ROWS:
        slowest: dict[str, Rank] = {}
        for rank in sorted(ranks, key=lambda r: r.tflops):
            slowest.setdefault(rank.node, rank)
        ranks = sorted(slowest.values(), key=lambda r: r.rank)
    cells = {head: [cell(rank) for rank in ranks] for head, cell in _COLUMNS.items()}
    shown = {head: column for head, column in cells.items() if any(column)}
    widths = {head: max(map(len, [head, *column])) for head, column in shown.items()}
    rows = [
        list(shown),
        *(list(row) for row in zip(*shown.values(), strict=True)),
    ]
    lines = [
        "  ".join(f"{c:>{w}}" for c, w in zip(row, widths.values(), strict=True)) for row in rows
    ]
    if len(ranks) < len(cluster.ranks):
        lines.append(f"(of {len(cluster.ranks)} ranks the slowest of each node; --json has all)")
    return "\n".join([*lines, "", *_job(cluster, expected), *_result(cluster, found)])


def values(cluster: Cluster, expected: Expected, found: list[str]) -> dict[str, Any]:
    return {
        "exit_code": exit_code(found),
        "findings": found,
        "expected": asdict(expected),
        **asdict(cluster),
    }


def exit_code(found: list[str]) -> int:
    return 1 if found else 0


def _job(cluster: Cluster, expected: Expected) -> list[str]:
    lines = []
    if expected.tflops and expected.node_gbs:
        lines.append(
            f"expected of an {expected.machine}: {rate(expected.tflops)} TFLOP/s, "
            f"{rate(expected.node_gbs)} GB/s in a node"
        )
    if cluster.all_reduce_gbs is not None:
        wanted = _wanted(expected.all_reduce_gbs)
        lines.append(f"all-reduce of all ranks: {rate(cluster.all_reduce_gbs)} GB/s{wanted}")
    if cluster.rails:
        worst = min(cluster.rails, key=lambda rail: rail.gbs)
        best = max(rail.gbs for rail in cluster.rails)
        one_host = len({rank.host for rank in cluster.ranks}) == 1
        where = "pretended nodes of one host" if one_host else "nodes"
        pairs = pluralize(len(cluster.rails), "pair")
        lines.append(
            f"rails of {pairs} of {where}: {rate(worst.gbs)} to {rate(best)} "
            f"GB/s{_wanted(expected.network_gbs)}; lowest {worst.nodes[0]} with {worst.nodes[1]}"
        )
    if cluster.skews:
        off = max(cluster.skews, key=lambda skew: abs(skew.seconds))
        lines.append(
            f"clocks of {len(cluster.skews) + 1} hosts: within {abs(off.seconds) * 1e3:.1f} ms "
            f"(+-{off.uncertainty * 1e3:.1f}), most {off.host}"
        )
    return lines


def _result(cluster: Cluster, found: list[str]) -> list[str]:
    if not found:
        return [f"fine: {pluralize(len(cluster.ranks), 'rank')}, nothing below expectation"]
    return [f"below expectation ({len(found)}):", *(f"  {line}" for line in found)]


def _wanted(value: float | None) -> str:
    return f", expected {rate(value)}" if value else ""


def _of(value: float | None, highest: float | None) -> str:
    return "" if value is None else f"{_number(value)} ({_number(highest)})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
