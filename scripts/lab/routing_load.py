#!/usr/bin/env python
"""Imbalance of a recorded routing over expert-parallel ranks, and the effect of replication.

    python scripts/lab/routing_load.py FILE [--expert 2 4 8] [--replica-slots 0 1 2 4] [--tokens
    4096]
        [--micro-batches M] [--cost ROWS] [--least ROWS] [--json OUT]

FILE is what run.record_routing wrote. Its tokens are one step, cut into micro-batches of --tokens a
rank; with --micro-batches 1 the numbers are those that a replay logs (model.moe.router.replay). For
each number of ranks and of replica slots the table has

  busiest expert   its tokens over the mean in the worst layer (`load_max` of a run), and on average
                   over layers
  busiest rank     its rows over the mean, micro-batch by micro-batch, with what copies cost: on
                   average over layers (`rank_load_with_replicas` of a run, without replication its
                   `rank_load_without_replicas`), and in the worst layer
  replicas         copies of experts, of a layer and micro-batch
  capacity_factor  the least parallel.capacity_factor with which no step is run again

It needs no GPU. A copy of an expert costs as many rows as in a run in bf16 on H200s, unless --cost
names another number, as the start page of a run does. What a layer with copies costs, of which the
page speaks too, depends on the size of experts, and is nothing here unless --least gives it.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.configs.tables.machines import rates_of
from phalanx.extras.replication.options import ReplicationOptions, copy_cost
from phalanx.moe.router.recording import RecordingFacts, read_facts, read_layer
from phalanx.scripts.lab.recorded_load import RecordedLoad, recorded_load
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.reader import may_leave

_COST = copy_cost(rates_of("", "h200"), width=2, keep=False)
_HEADS = (
    "ranks",
    "slots",
    "micro-batches",
    "busiest expert, worst layer",
    "busiest expert, mean",
    "busiest rank, mean",
    "busiest rank, worst layer",
    "replicas",
    "capacity_factor",
)


@may_leave
@reports_bad_input("routing_load")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    facts = read_facts(args.file)
    check(args, facts.experts)
    ids = {name: read_layer(args.file, name) for name in facts.layers}
    loads = [
        recorded_load(
            ids,
            facts.experts,
            ranks=ranks,
            tokens=args.tokens,
            replication=ReplicationOptions(slots, args.cost, least=args.least),
            micro_batches=args.micro_batches,
        )
        for ranks in args.expert
        for slots in args.replica_slots
    ]
    print(f"{heading(facts, args)}\n\n{table(loads)}")
    for ranks in args.expert:
        if (batch := ranks * args.tokens) > facts.tokens:
            print(f"\n{batch:,} tokens of {pluralize(ranks, 'rank')} repeat the recorded ones.")
    if args.json:
        settings = {"recorded": asdict(facts), "tokens": args.tokens}
        settings |= {"cost": args.cost, "least": args.least}
        content = settings | {"loads": [asdict(load) for load in loads]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("routing_load", __doc__)
    add = p.add_argument
    add("file", type=Path, metavar="FILE")
    add("--expert", type=int, nargs="+", default=[2, 4, 8], metavar="R", help="ranks of a group")
    add(
        "--replica-slots",
        type=int,
        nargs="+",
        default=[0, 1, 2, 4],
        metavar="N",
        help="slots of a rank",
    )
    add("--tokens", type=int, default=4096, metavar="T", help="of a rank and micro-batch")
    add("--micro-batches", type=int, metavar="M", help="default: as many as were recorded")
    add("--cost", type=int, default=_COST, metavar="ROWS", help=f"of a copy; default: {_COST:,}")
    add("--least", type=int, default=0, metavar="ROWS", help="of a layer with copies; default: 0")
    add("--json", type=Path, metavar="OUT", help="write the numbers of every layer")
    return p


def check(args: argparse.Namespace, experts: int) -> None:
    """Raise ValueError for options that do not fit a recording of `experts` experts."""
    parts = args.micro_batches
    for option, least, values in (
        ("expert", 1, args.expert),
        ("replica-slots", 0, args.replica_slots),
        ("tokens", 1, [args.tokens]),
        ("micro-batches", 1, [] if parts is None else [parts]),
        ("cost", 0, [args.cost]),
        ("least", 0, [args.least]),
    ):
        if min(values, default=least) < least:
            raise ValueError(f"--{option} {min(values)}: must be at least {least}")
    for ranks in args.expert:
        if experts % ranks:
            raise ValueError(f"--expert {ranks}: {experts} experts do not divide over so many")
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")


def heading(facts: RecordingFacts, args: argparse.Namespace) -> str:
    """Heading of the table: the recording, and the assumed costs."""
    options = ReplicationOptions(0, args.cost, least=args.least)
    return (
        f"{args.file.name}: {facts.tokens:,} tokens of {facts.model} after step {facts.step:,}, "
        f"{pluralize(len(facts.layers), 'layer')}, top {facts.top_k} of {facts.experts} experts; "
        f"{args.tokens:,} tokens a rank and micro-batch; {options.cost_text}"
    )


def table(loads: Iterable[RecordedLoad]) -> str:
    """A row of Markdown for each number of ranks and of replica slots."""
    rows = []
    for load in loads:
        layers = load.layers.values()
        ratios = (
            load.load_max,
            mean(layer.load_max for layer in layers),
            load.busiest_rank,
            max(layer.busiest_rank for layer in layers),
            load.replicas,
            load.capacity_factor,
        )
        sizes = (load.ranks, load.replica_slots, load.micro_batches)
        rows.append([*map(str, sizes), *(f"{ratio:.2f}" for ratio in ratios)])
    lines = [_HEADS, ["---:"] * len(_HEADS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())
