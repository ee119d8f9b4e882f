"""Speed of the expert kernels on one GPU: ours against peers, and against what is asked of them.

    python scripts/lab/bench_kernels.py [SUITE ...] [--peers all] [--json PATH]
    python scripts/lab/bench_kernels.py --tune [--dry]
    python scripts/lab/bench_kernels.py --from-json PATH

Suites (default: all, without peers):
  mlp        expert MLP on sorted rows            peers: torch, te (Transformer Engine)
  layer      whole MoE layer with its router      peer: sonic (SonicMoE with QuACK)
  margins    kernels beside SMs that are left free, idle or taken by a copy kernel
  skew       Zipf-skewed routing against balanced rows
  gather     rows picked by an index against the same rows side by side
  host       host time of a call
  fp8        expert MLP in FP8 against bf16, down to experts for which FP8 does not pay
                                                 peer: te, in its blockwise recipe
  fp8_gemms  the grouped GEMMs in FP8 against those in bf16
  wgrad_pairs  weight gradients of two micro-batches in one pass over fp32 sums against two passes

Times are medians of interleaved rounds on the GPU, the L2 cache flushed before each; a ratio is
the other side's time over ours. TFLOP/s count 6 * rows * D * F forward and twice that backward, for
a kernel 2 * rows * K * N. A missed bar is no error: exit code 1 is for failures and wrong results.
SonicMoE tunes itself for a minute or two a shape unless $QUACK_CACHE_DIR remembers. Importing it
changes the compiler that our kernels use too, so with it `layer` runs last.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phalanx.configs import programs
from phalanx.scripts.cluster.facts import facts
from phalanx.scripts.lab.bench import shapes
from phalanx.scripts.lab.bench.clocks import Gpu
from phalanx.scripts.lab.bench.records import Record, Report, show
from phalanx.scripts.lab.bench.shapes import Shape
from phalanx.scripts.lab.bench.timing import Bench, reason

PEERS = ("torch", "te", "sonic")
RUNS = {
    "mlp": ("kernels.mlp", "suite"),
    "layer": ("kernels.layer", "suite"),
    "margins": ("kernels.operations", "margins"),
    "skew": ("kernels.operations", "skew"),
    "gather": ("kernels.operations", "gather"),
    "host": ("kernels.host", "suite"),
    "fp8": ("kernels.fp8", "suite"),
    "fp8_gemms": ("kernels.fp8_gemms", "suite"),
    "wgrad_pairs": ("kernels.wgrad_pairs", "suite"),
}
"""Module and function of each suite; imported when it runs."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = programs.parser("bench_kernels", __doc__)
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(RUNS)}")
    add(
        "--shape",
        action="append",
        default=[],
        metavar="SIZES",
        help="only shapes that begin with these sizes, or a whole new one; may be repeated",
    )
    add("--peers", default="", metavar="LIST", help=f"all, or some of {','.join(PEERS)}")
    add("--rounds", type=int, default=20, metavar="N", help="default: %(default)s")
    add(
        "--warm",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds of rounds before those that count, for clocks and power of a long run",
    )
    add("--json", type=Path, metavar="PATH", help="write the results, after every shape")
    add("--from-json", type=Path, metavar="PATH", help="measure nothing, show these results")
    add("--tune", action="store_true", help="measure all tiles and rewrite tiles.json")
    add("--dry", action="store_true", help="with --tune: show the new table, write nothing")
    args = parser.parse_args(argv)
    unknown = [s for s in args.suites if s not in RUNS]
    if unknown:
        parser.error(f"{unknown[0]}: a suite is one of {', '.join(RUNS)}")
    args.demanded = args.peers not in ("", "all")
    args.peers = (
        PEERS if args.peers == "all" else tuple(args.peers.split(",") if args.peers else ())
    )
    for peer in args.peers:
        if peer not in PEERS:
            parser.error(f"--peers {peer}: a peer is one of {', '.join(PEERS)}")
    try:
        args.shape = [shapes.parse(text) for text in args.shape]
    except ValueError as error:
        parser.error(f"--shape {error}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if not 0 <= args.warm < 60:
        parser.error(f"--warm {args.warm:g}: seconds, below 60")
    if args.dry and not args.tune:
        parser.error("--dry: goes with --tune")
    if args.tune and (args.suites or args.shape):
        parser.error("--tune: has its own shapes, and runs no suite")
    args.suites = args.suites or list(RUNS)
    if "sonic" in args.peers:
        args.suites.sort(key=lambda suite: suite == "layer")
    args.selected = {suite: shapes.select(suite, args.shape) for suite in args.suites}
    if not any(args.selected.values()):
        parser.error("--shape: no suite that was named has such a shape")
    return args


def run(bench: Bench, selected: dict[str, tuple[Shape, ...]], report: Report) -> None:
    """Run all suites; an error of a shape becomes a record."""
    for suite, shapes_ in selected.items():
        for shape in shapes_:
            report.add(bench.attempt(partial(_records, bench, suite, shape), suite, shape))
            bench.clock.free()


def _records(bench: Bench, suite: str, shape: Shape) -> list[Record]:
    module, function = RUNS[suite]
    measured: Callable[[Bench, Shape], list[Record]] = getattr(
        importlib.import_module(f"phalanx.scripts.lab.bench.{module}"), function
    )
    return measured(bench, shape)


def tune(bench: Bench, report: Report, *, dry: bool) -> None:
    """Measure all kinds of tiles.json, show what changes, and write it unless dry."""
    from phalanx.kernels.sm90.gemm import tiles
    from phalanx.scripts.lab.bench.kernels import tune as tuning

    old, new = tiles.table(), {}
    for kind in old:
        try:
            records, entry = tuning.kind(bench, kind)
        except Exception as error:
            records, entry = [Record("tune", (), "-", kind, note=reason(error), failed=True)], {}
        report.add(records)
        new[kind] = entry or old[kind]
        bench.clock.free()
    print("\n" + "\n".join(tuning.changes(old, new)))
    if dry:
        print(f"{tiles.PATH.name} was left as it is")
    else:
        tuning.update(tiles.PATH, new)
        print(f"wrote {tiles.PATH}")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.from_json is not None:
        return show(args.from_json)
    import torch

    if not torch.cuda.is_available():
        print("this script measures on a CUDA device, and there is none", file=sys.stderr)
        return 1
    options = dict(shapes=args.selected, warm=args.warm)
    bench = Bench(Gpu(), args.rounds, args.peers, args.demanded, **options)
    command = sys.argv[1:] if argv is None else list(argv)
    report = Report(args.json, facts(bench.clock.device, command))
    report.start()
    if args.tune:
        tune(bench, report, dry=args.dry)
    else:
        run(bench, args.selected, report)
    return report.finish(bench.clock.device)


if __name__ == "__main__":
    sys.exit(main())
