#!/usr/bin/env python
"""What a GPU did in a trace of `run.profile`: time by kind of kernel, and what ran under what.

    python scripts/timeline.py runs/NAME/trace_5_6.json.gz [--top N] [--window FROM TO]
        [--crop CROP.json] [--plot PICTURE.png]

`alone` is the time in which nothing of another kind ran: of exchanges it is what a step waits for.
--window takes milliseconds from the first kernel on; --crop writes the kernels of the window as a
small trace, which this program reads again, and --plot draws them, a lane a kind.
"""

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.pictures import pyplot

KINDS = (
    ("exchange", r"PushKernel|ArriveKernel|nccl"),
    ("experts", r"Fc1Kernel|RowsKernel|DgradKernel|WgradKernel|BiasGradKernel|DprobKernel|grouped"),
    ("plan, sums", r"PlanKernel|GatherKernel|CombineKernel|TopkKernel|TopkGradientKernel"),
    ("attention", r"cudnn|fmha|flash|flex|sdpa|rope|rotary"),
    ("GEMM", r"nvjet|gemm|xmma|cutlass|cublas|splitK"),
    ("optimizer", r"[aA]dam|multi_tensor|l2norm"),
    ("other", r""),
)
"""Kind of a kernel: the first whose pattern is found in its name."""
COLOURS = ("#c44e52", "#4c72b0", "#64b5cd", "#8172b3", "#55a868", "#ccb974", "#b0b0b0")
_SHORT = 72


class Event(NamedTuple):
    """A kernel or copy; microseconds from the first one's begin."""

    begin: float
    end: float
    stream: int
    name: str

    @property
    def kind(self) -> str:
        return next(kind for kind, pattern in KINDS if re.search(pattern, self.name))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = _parser().parse_args(argv)
    try:
        events = read(args.trace)
        if args.window:
            low, high = (1000 * edge for edge in args.window)
            events = [e for e in events if e.begin < high and e.end > low]
        if not events:
            raise ValueError(
                f"{args.trace} has no GPU kernels there: check --window and run.profile"
            )
        print(table(events, args.top))
        if args.crop:
            args.crop.write_text(json.dumps({"traceEvents": [_record(e) for e in events]}))
        if args.plot:
            plot(events, args.plot)
    except (ValueError, OSError, KeyError) as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 2
    return 0


def read(path: Path) -> list[Event]:
    """GPU events of a Chrome trace, in the order of their begins; ValueError if it is none."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        try:
            records = json.load(file)["traceEvents"]
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError):
            raise ValueError(f"{path} is no trace of torch.profiler") from None
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = sorted(
        (r["ts"], r["dur"], r.get("args", {}).get("stream", 0), r["name"])
        for r in records
        if r.get("ph") == "X" and r.get("cat") in kinds
    )
    first = found[0][0] if found else 0.0
    return [Event(ts - first, ts - first + dur, stream, name) for ts, dur, stream, name in found]


def _record(event: Event) -> dict[str, Any]:
    begin, end, stream, name = event
    where = {"ts": begin, "dur": end - begin, "args": {"stream": stream}}
    return {"ph": "X", "cat": "kernel", "name": name, **where}


def union(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Intervals in which at least one of them ran, in order."""
    merged: list[tuple[float, float]] = []
    for e in sorted(events):
        if merged and e.begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], e.end))
        else:
            merged.append((e.begin, e.end))
    return merged


def without(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Time in `some` that is not in `others`, both as `union` makes them."""
    left, at = 0.0, 0
    for begin, end in some:
        left += end - begin
        while at < len(others) and others[at][1] <= begin:
            at += 1
        i = at
        while i < len(others) and others[i][0] < end:
            left -= min(end, others[i][1]) - max(begin, others[i][0])
            i += 1
    return left


def alone(events: list[Event], kind: str) -> float:
    """Time in which kernels of a kind ran and no others."""
    return without(
        union(e for e in events if e.kind == kind), union(e for e in events if e.kind != kind)
    )


def exposed(events: list[Event]) -> float:
    """Share of the time in which exchanges ran and nothing else did."""
    exchange, _ = KINDS[0]
    return alone(events, exchange) / (max(e.end for e in events) - events[0].begin)


def table(events: list[Event], top: int) -> str:
    """Time by kind, and the kernels that take most."""
    span = max(e.end for e in events) - events[0].begin
    busy = sum(end - begin for begin, end in union(events))
    lines = [f"{span / 1000:.2f} ms, the GPU idle in {(span - busy) / 1000:.2f} ms of them", ""]
    lines.append(f"{'kind':12}{'ms':>10}{'alone':>10}{'kernels':>9}")
    for kind, _ in KINDS:
        own = [e for e in events if e.kind == kind]
        if own:
            took = sum(end - begin for begin, end in union(own)) / 1000
            lines.append(f"{kind:12}{took:10.2f}{alone(events, kind) / 1000:10.2f}{len(own):9}")
    by_name: dict[str, list[float]] = {}
    for e in events:
        by_name.setdefault(e.name, []).append(e.end - e.begin)
    lines += ["", f"{'kernel':{_SHORT}}{'ms':>9}{'calls':>7}{'us each':>9}"]
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]:
        total = sum(times)
        each = total / len(times)
        lines.append(f"{short(name):{_SHORT}}{total / 1000:9.2f}{len(times):7}{each:9.1f}")
    return "\n".join(lines)


def short(name: str) -> str:
    """A kernel's name without what all of its family have."""
    ours = re.search(r"kernelssm90\w*?([A-Z]\w*?Kernel)_object", name)
    return (f"kernels.sm90 {ours[1]}" if ours else name.removeprefix("void "))[: _SHORT - 2]


def plot(events: list[Event], path: Path) -> None:
    """A lane a kind, since a graph's branches have no streams; ValueError without matplotlib."""
    pictures = pyplot()
    kinds = [kind for kind, _ in KINDS if any(e.kind == kind for e in events)]
    colours = dict(zip((kind for kind, _ in KINDS), COLOURS, strict=True))
    figure, axes = pictures.subplots(figsize=(12, 0.8 + 0.4 * len(kinds)))
    for lane, kind in enumerate(kinds):
        bars = [(e.begin / 1000, (e.end - e.begin) / 1000) for e in events if e.kind == kind]
        axes.broken_barh(bars, (-lane - 0.4, 0.8), facecolor=colours[kind])
    axes.set_yticks([-lane for lane in range(len(kinds))], kinds)
    axes.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pictures.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("trace", type=Path, help="trace_*.json.gz of a run, or what --crop wrote")
    add("--top", type=int, default=15, metavar="N", help="kernels to list; default: %(default)s")
    add("--window", type=float, nargs=2, metavar=("FROM", "TO"), help="ms from the first kernel")
    add("--crop", type=Path, metavar="CROP.json", help="write the kernels of the window")
    add("--plot", type=Path, metavar="PICTURE.png", help="draw them; needs matplotlib")
    return parser


if __name__ == "__main__":
    sys.exit(main())
