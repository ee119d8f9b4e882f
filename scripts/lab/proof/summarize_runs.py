#!/usr/bin/env python
"""Numbers of several runs as one JSON file, as docs/proof keeps them.

    python scripts/lab/proof/summarize_runs.py results/long_* --json OUT

A run is its folder. Of each: the overrides that it was started with but those of folders and data,
what computes the experts, the speed of its last steps, the time that it spent on what, the load of
its experts, and its validations as rows of `columns_of_evaluations`. Seconds of a row are those of
plot_bits.py.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.moe.report.loggers import lines, read, start_facts
from phalanx.scripts.lab.proof.plot_bits import points
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.reader import may_leave

_SPEED, _LOSS, _LOAD = 20, 50, 100
"""Last steps that the median speed, the mean loss and the mean load are taken of."""
_ELSEWHERE = ("data.blend=", "data.validation=", "data.split=", "run.dir=", "run.name=")


@may_leave
@reports_bad_input("summarize_runs")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    runs = {folder.resolve().name: summary(folder) for folder in args.runs}
    args.json.write_text(text(runs), encoding="utf-8")
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("summarize_runs", __doc__)
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    p.add_argument("--json", type=Path, metavar="OUT", required=True, help="file to write")
    return p


def text(runs: dict[str, dict[str, Any]]) -> str:
    """JSON of the summaries, with a line for each field and each validation."""
    blocks = []
    for name, fields in runs.items():
        rows = [f"   {json.dumps(key)}: {_value(value)}" for key, value in fields.items()]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n  }")
    return '{\n "runs": {\n' + ",\n".join(blocks) + "\n }\n}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n   ]"
    return json.dumps(value)


def summary(folder: Path) -> dict[str, Any]:
    """Numbers of the run in a folder; ValueError without a step or validation, or OSError."""
    path = folder / "metrics.jsonl"
    steps = [record for record in read(path) if "loss" in record]
    if not steps:
        raise ValueError(f"{path} has no step")
    facts, last = start_facts(path), steps[-1]
    end = next(record for record in reversed(lines(path)) if "goodput" in record)
    # A CPU has no peak of which that would be a part.
    mfu = {"mfu": round(_last(steps, "mfu", _SPEED), 4)} if "mfu" in last else {}
    found: dict[str, Any] = {
        "overrides": _overrides(folder / "config.yaml"),
        "experts": facts.get("experts"),
        "ranks": facts["ranks"],
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_per_second_per_gpu": round(_last(steps, "tokens_per_second_per_gpu", _SPEED)),
        **mfu,
        "memory_gib": round(max(record["memory"] for record in steps), 1),
        "goodput": round(end["goodput"], 3),
        "seconds": {kind: round(spent, 1) for kind, spent in end["seconds"].items()},
        "train_loss": round(statistics.mean(r["loss"] for r in steps[-_LOSS:]), 4),
    }
    if "load_max" in last:
        idle = [record["step"] for record in steps if record["dead_experts"]]
        found["load"] = {
            "busiest_over_mean": round(statistics.mean(r["load_max"] for r in steps[-_LOAD:]), 2),
            "last_step_with_idle_expert": max(idle, default=0),
        }
    validations = points(path)
    domains = sorted(validations[-1].domains)
    found["columns_of_evaluations"] = ["tokens", "seconds", "all", *domains]
    found["evaluations"] = [
        [
            round(point.tokens),
            round(point.seconds, 1),
            round(point.bits, 4),
            *(round(point.domains[domain], 4) for domain in domains),
        ]
        for point in validations
    ]
    return found


def _last(steps: list[dict[str, Any]], key: str, count: int) -> float:
    return statistics.median(record[key] for record in steps[-count:])


def _overrides(path: Path) -> str:
    """Overrides in the first line of a run's config.yaml, without those of folders and data."""
    with path.open(encoding="utf-8") as file:
        command = file.readline()
    given = shlex.split(command.partition("train.py ")[2])
    return " ".join(each for each in given if not each.startswith(_ELSEWHERE))


if __name__ == "__main__":
    sys.exit(main())
