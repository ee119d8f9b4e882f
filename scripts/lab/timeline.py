#!/usr/bin/env python
"""Summarize a trace of `run.profile`: time by kind of work, and overlap between kinds.

    python scripts/lab/timeline.py runs/NAME/trace_5_6.json.gz [--top N] [--window FROM TO]
        [--crop CROP.json] [--plot PICTURE.png] [--title TEXT]

A run on GPUs is summarized by its kernels, a run on CPU processes by the operations of rank 0, each
without the time of operations that it called. `alone` is the time in which no other kind ran: for
exchanges, the exposed time. --window takes milliseconds from the first kernel or operation; --crop
writes the events of the window as a small trace, which this program can read, and --plot draws
them, a lane per kind, with a line at the start of each step. Events shorter than a pixel are drawn
one pixel wide.
"""

import argparse
import functools
import gzip
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phalanx.configs import programs
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.pictures import pyplot, title
from phalanx.scripts.output.reader import may_leave

KINDS = (
    # A function that sends and waits has no other operation below it.
    (
        "exchange",
        r"PushKernel|WaitPeersKernel|ArriveKernel|nccl|gloo:|c10d::|_(Spread|Collect)(Backward)?$"
        r"|send_weights_kernel|signal_grads_kernel|reduce_grads_kernel",
    ),
    (
        "experts",
        r"Fc1Kernel|GroupedGemmKernel|DgradKernel|Wgrad(Pair)?Kernel|BiasGradKernel|DprobKernel|grouped"
        r"|bias_products",
    ),
    (
        "plan, sums",
        r"PlanKernel|GatherKernel|CombineKernel|TopkKernel|TopkGradientKernel"
        r"|pack_routing|block_sum|moe/(route|dispatch|combine)|phalanx::plan|_plan_|Router|_Spread|_Collect"
        r"|router_|split_returns|sum_unreduced_rows|add_parts|count_chunks|assign_pairs_kernel|split_order",
    ),
    ("loss", r"cross_entropy|CrossEntropy"),
    ("norm", r"(?i)rms_?norm|layer_?norm|norm_weight_gradient"),
    ("rope", r"\brope|_rope|rotary|qkv_(part|join)"),
    ("MLA keys", r"\bmla_"),
    (
        "attention",  # linear attention's kernels are flash-linear-attention's
        r"cudnn|fmha|flash|flex|sdpa|attention|delta_rule|gdn_|causal_conv1d|l2norm_(fwd|bwd)"
        r"|chunk_(fwd|bwd|local|scaled)|_w_u_|wy_repr|solve_tril|_inverse_kernel",
    ),
    ("GEMM", r"nvjet|gemm|xmma|cutlass|cublas|splitK|aten::(add|b|addb)?mm$|aten::linear$"),
    ("Adam", r"[aA]dam"),
    ("optimizer", r"muon_|symmetric_product|multi_tensor|l2norm|square_sum|optimizer"),
    ("other", r""),
)
"""Patterns by kind: the first that matches an event's name or its enclosing operations decides."""
COLOURS = (
    *("#c44e52", "#4c72b0", "#64b5cd", "#dd8452", "#b8860b", "#da8bc3", "#937860", "#8172b3"),
    *("#55a868", "#ccb974", "#8c8c3c", "#b0b0b0"),
)
_SHORT = 72
_STEP = re.compile(r"step \d+$")  # annotation of a step (`moe.report.profiler`)


class Event(NamedTuple):
    """A kernel or copy, or an operation's self time; microseconds from the first event."""

    begin: float
    end: float
    stream: int  # GPU stream, or thread
    name: str
    stack: str = ""  # enclosing operations, outermost first
    call: int = -1  # nested calls cut one into several events; -1: a kernel

    @property
    def kind(self) -> str:
        return _kind(f"{self.stack} {self.name}")


@functools.cache
def _kind(text: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, text))


class Trace(NamedTuple):
    """Contents of a trace file."""

    events: list[Event]  # events sorted by start time
    on_gpu: bool
    facts: dict[
        str, Any
    ]  # facts of `moe.report.start_page`, and `steps`; empty if the file has none
    steps: tuple[tuple[float, str], ...] = ()
    """Start of each step, microseconds on the events' clock, and its name, `step 5`."""


@may_leave
@reports_bad_input("timeline")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    try:
        trace = read(args.trace)
    except KeyError as missing:
        raise ValueError(f"{args.trace} has an event without {missing}") from None
    if args.window:
        low, high = (1000 * edge for edge in args.window)
        inside = [e for e in trace.events if e.begin < high and e.end > low]
        trace = trace._replace(events=inside, steps=_steps_in(trace.steps, low, high))
    if not trace.events:
        raise ValueError(
            f"{args.trace} has no kernels or operations there: check --window and run.profile"
        )
    print(table(trace, args.top))
    if args.crop:
        args.crop.write_text(json.dumps(_content(trace)))
    if args.plot:
        plot(trace, args.plot, args.title or _title(trace.facts))
    return 0


def read(path: Path) -> Trace:
    """Read a Chrome trace: GPU events, or else CPU operations; ValueError if it is no trace."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        try:
            content = json.load(file)
            records = [r for r in content["traceEvents"] if r.get("ph") == "X"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f"{path} is no trace of torch.profiler") from None
    kinds: tuple[str, ...] = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [
        Event(r["ts"], r["ts"] + r["dur"], r.get("args", {}).get("stream", 0), r["name"])
        for r in records
        if r.get("cat") in kinds
    ]
    on_gpu = bool(events)
    if not on_gpu:
        kinds = ("cpu_op", "user_annotation")
        operations = [r for r in records if r.get("cat") in kinds and not _STEP.match(r["name"])]
        for number, record in enumerate(operations):
            record["args"] = {"call": number} | record.get("args", {})
        for thread in sorted({r.get("tid", 0) for r in operations}):
            events += _own_times([r for r in operations if r.get("tid", 0) == thread])
    events.sort()
    first = events[0].begin if events else 0.0
    events = [e._replace(begin=e.begin - first, end=e.end - first) for e in events]
    steps = tuple((time - first, name) for time, name in _steps(records, on_gpu))
    return Trace(events, on_gpu, _facts(content), steps)


def _steps(records: list[dict[str, Any]], on_gpu: bool) -> list[tuple[float, str]]:
    """Start of each step that the host annotates.

    On a GPU that of its first kernel, which may run much later.
    """
    host = [r for r in records if r.get("cat") == "user_annotation" and _STEP.match(r["name"])]
    begins = sorted((r["ts"], r["name"]) for r in host)
    if not on_gpu:
        return begins
    launched = {
        r["args"]["correlation"]: r["ts"]
        for r in records
        if r.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in r.get("args", {})
    }
    starts: dict[str, float] = {}
    for r in sorted((r for r in records if r.get("cat") == "kernel"), key=lambda r: -r["ts"]):
        since = launched.get(r.get("args", {}).get("correlation"))
        if since is not None and (named := [name for ts, name in begins if ts <= since]):
            starts[named[-1]] = r["ts"]
    # A crop stores the starts.
    starts |= {r["name"]: r["ts"] for r in host if r.get("args", {}).get("first_kernel")}
    return sorted((time, name) for name, time in starts.items())


def _steps_in(
    steps: Sequence[tuple[float, str]], low: float, high: float
) -> tuple[tuple[float, str], ...]:
    """Steps that overlap a window, each from its start or the window's."""
    ends = [*(time for time, _ in steps[1:]), float("inf")]
    each = zip(steps, ends, strict=False)  # `ends` has one entry even without steps
    return tuple((max(time, low), name) for (time, name), end in each if time < high and end > low)


def _own_times(records: list[dict[str, Any]]) -> Iterator[Event]:
    """Self times of a thread's operations, without the operations that they called.

    That of our annotations is Python's and left out; gloo's annotations are its exchanges.
    """
    records = sorted(records, key=lambda r: (r["ts"], -r["dur"]))
    stack: list[tuple[float, dict[str, Any]]] = []  # (end, record)
    clock = 0.0

    def until(time: float) -> Iterator[Event]:
        """Self time of the innermost operation from `clock` to `time`."""
        nonlocal clock
        names = [r["name"] for _, r in stack]
        record = stack[-1][1]
        if time > clock and (record["cat"] == "cpu_op" or "gloo:" in names[-1]):
            args = record["args"]
            inside = " ".join([args.get("stack", ""), *names[:-1]]).strip()
            yield Event(clock, time, record.get("tid", 0), names[-1], inside, args["call"])
        clock = time

    for record in records:
        while stack and stack[-1][0] <= record["ts"]:
            yield from until(stack[-1][0])
            stack.pop()
        if stack:
            yield from until(record["ts"])
        clock = record["ts"]
        stack.append((record["ts"] + record["dur"], record))
    while stack:
        yield from until(stack[-1][0])
        stack.pop()


def _facts(content: dict[str, Any]) -> dict[str, Any]:
    facts = content.get("phalanx")
    return facts if isinstance(facts, dict) else {}


def _title(facts: dict[str, Any]) -> str:
    run_title = title(facts)
    first, last = facts.get("steps", (0, 0))
    if not run_title or not first:
        return run_title
    return (
        f"{run_title}: step {first}" if first == last else f"{run_title}: steps {first} to {last}"
    )


def _content(trace: Trace) -> dict[str, Any]:
    """The trace in the format that `read` accepts."""
    kind = "kernel" if trace.on_gpu else "cpu_op"
    records = list[dict[str, Any]]()
    for begin, end, stream, name, stack, call in trace.events:
        event_args = {"stream": stream} if trace.on_gpu else {"stack": stack, "call": call}
        place = {"ts": begin, "dur": end - begin, "tid": stream}
        records.append({"ph": "X", "cat": kind, "name": name, **place, "args": event_args})
    for time, name in trace.steps:
        place = {"ts": time, "dur": 0, "tid": 0}
        about = {"first_kernel": trace.on_gpu}
        records.append({"ph": "X", "cat": "user_annotation", "name": name, **place, "args": about})
    return {"traceEvents": records} | ({"phalanx": trace.facts} if trace.facts else {})


def union(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Intervals in which at least one event ran, in order."""
    merged: list[tuple[float, float]] = []
    for e in sorted(events):
        if merged and e.begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], e.end))
        else:
            merged.append((e.begin, e.end))
    return merged


def without(some: list[tuple[float, float]], excluded: list[tuple[float, float]]) -> float:
    """Time in `some` but not in `others`; both are results of `union`."""
    left, first = 0.0, 0
    for begin, end in some:
        left += end - begin
        while first < len(excluded) and excluded[first][1] <= begin:
            first += 1
        i = first
        while i < len(excluded) and excluded[i][0] < end:
            left -= min(end, excluded[i][1]) - max(begin, excluded[i][0])
            i += 1
    return left


def alone(events: list[Event], kind: str) -> float:
    return without(
        union(e for e in events if e.kind == kind), union(e for e in events if e.kind != kind)
    )


def exposed(events: list[Event]) -> float:
    exchange, _ = KINDS[0]
    return alone(events, exchange) / (max(e.end for e in events) - events[0].begin)


def table(trace: Trace, top: int) -> str:
    """Time by kind, and the longest-running kernels or operations."""
    events, unit = trace.events, "kernel" if trace.on_gpu else "operation"
    span = max(e.end for e in events) - events[0].begin
    busy = sum(end - begin for begin, end in union(events))
    idle = "the GPU idle" if trace.on_gpu else "no operation"
    lines = [run_title] if (run_title := _title(trace.facts)) else []
    lines += [f"{span / 1000:.2f} ms, {idle} in {(span - busy) / 1000:.2f} ms of them", ""]
    lines.append(f"{'kind':12}{'ms':>10}{'alone':>10}{unit + 's':>12}")
    for kind, _ in KINDS:
        of_kind = [e for e in events if e.kind == kind]
        if of_kind:
            took = sum(end - begin for begin, end in union(of_kind)) / 1000
            lines.append(
                f"{kind:12}{took:10.2f}{alone(events, kind) / 1000:10.2f}{_calls(of_kind):12}"
            )
    by_name: dict[str, list[Event]] = {}
    for e in events:
        by_name.setdefault(e.name, []).append(e)
    took_most = sorted(by_name.items(), key=lambda item: -sum(e.end - e.begin for e in item[1]))
    lines += ["", f"{unit:{_SHORT}}{'ms':>9}{'calls':>7}{'us each':>9}"]
    for name, of_kind in took_most[:top]:
        total, calls = sum(e.end - e.begin for e in of_kind), _calls(of_kind)
        each = total / calls
        lines.append(f"{short(name):{_SHORT}}{total / 1000:9.2f}{calls:7}{each:9.1f}")
    return "\n".join(lines)


def _calls(events: Sequence[Event]) -> int:
    """Number of kernels, or of operations, which may be cut into several events."""
    cut = {e.call for e in events if e.call >= 0}
    return len(cut) + sum(e.call < 0 for e in events)


def short(name: str) -> str:
    """A kernel's name without common prefixes."""
    ours = re.search(r"kernelssm90\w*?([A-Z]\w*?Kernel)_object", name)
    return (f"phalanx.kernels.sm90 {ours[1]}" if ours else name.removeprefix("void "))[: _SHORT - 2]


def plot(trace: Trace, path: Path, heading: str) -> None:
    """Draw a lane per kind (a graph's branches have no streams); ValueError without matplotlib."""
    pictures, events = pyplot(), trace.events
    kinds = [kind for kind, _ in KINDS if any(e.kind == kind for e in events)]
    colours = dict(zip((kind for kind, _ in KINDS), COLOURS, strict=True))
    figure, axes = pictures.subplots(
        figsize=(12, 1.4 + 0.4 * len(kinds)), dpi=130, layout="constrained"
    )
    first, last = events[0].begin / 1000, max(e.end for e in events) / 1000
    margin = 0.01 * (last - first)
    axes.set_xlim(first - margin, last + margin)
    axes.set_ylim(0.5 - len(kinds), 0.9)
    axes.set_yticks([-lane for lane in range(len(kinds))], kinds)
    axes.set_xlabel("ms from the first " + ("kernel" if trace.on_gpu else "operation"))
    axes.set_title(heading or path.stem, fontsize="medium", wrap=True)
    for time, name in trace.steps:
        axes.axvline(time / 1000, color="black", linewidth=0.8, linestyle=":", zorder=0)
        axes.text(time / 1000, 0.65, f" {name}", fontsize="small", va="center")
    figure.draw_without_rendering()  # lays it out
    pixel = (last - first + 2 * margin) / axes.bbox.width
    for lane, kind in enumerate(kinds):
        busy = union(e for e in events if e.kind == kind)
        bars = [(begin / 1000, max((end - begin) / 1000, pixel)) for begin, end in busy]
        axes.broken_barh(bars, (-lane - 0.4, 0.8), facecolor=colours[kind], linewidth=0)
    figure.savefig(path)
    pictures.close(figure)


def parser() -> argparse.ArgumentParser:
    p = programs.parser("timeline", __doc__)
    add = p.add_argument
    add("trace", type=Path, help="trace_*.json.gz of a run, or what --crop wrote")
    add("--top", type=int, default=15, metavar="N", help="rows of the list; default: %(default)s")
    add("--window", type=float, nargs=2, metavar=("FROM", "TO"), help="ms from the first event")
    add("--crop", type=Path, metavar="CROP.json", help="write what is in the window")
    add("--plot", type=Path, metavar="PICTURE.png", help="draw it; needs matplotlib")
    add("--title", metavar="TEXT", help="of the picture; default: what was run, and the steps")
    return p


if __name__ == "__main__":
    sys.exit(main())
