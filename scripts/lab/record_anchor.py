#!/usr/bin/env python
"""Write a throughput record, docs/measured/training/NAME.yaml, from a metrics.jsonl.

The settings are read from the given command, the rates from steps 41-50 of the metrics. The two
must agree on tokens per step, and on TFLOP/s by configs.arithmetic.accounting. configs/records.py
documents the fields.
"""

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.arithmetic.accounting import flops_per_token
from phalanx.configs.load import load
from phalanx.configs.records import MEASURED, WINDOW, OwnRecord, launch
from phalanx.configs.schema import Config
from phalanx.configs.validate import data_parallel_size, expert_parallel_size, validate
from phalanx.moe.report.loggers import is_finite, read, start_facts
from phalanx.scripts.output.bad_input import reports_bad_input

TOLERANCE = 0.01  # between metrics and the values of the command
PACKAGES = ("torch", "megatron-core", "transformer-engine")

EXAMPLE = """example:
  record_anchor.py --metrics runs/bench_gpt_oss_20b/metrics.jsonl --name own_gpt_oss_20b_torch \\
    --hardware "8 x H200" --command "torchrun --standalone --nproc-per-node 8 train.py \\
    experiment=gpt_oss_20b_8gpu run=bench kernels=torch"

Run it on the tree and with the packages that made the metrics, or say --commit and --version."""


@reports_bad_input("record_anchor")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    if not re.fullmatch(r"own_\w+", args.name):
        raise ValueError(f"--name {args.name}: letters, digits and _ after own_")
    record = measured(args)
    path = args.folder / f"{args.name}.yaml"
    write(record, path)
    print(
        f"{path}: {record.tokens_per_second_per_gpu:,.0f} +- "
        f"{record.tokens_per_second_per_gpu_sd:,.0f} tokens/s/GPU, {record.tflops_per_gpu:.0f} "
        f"TFLOP/s/GPU, loss {record.loss_at_50:.4f}, {record.peak_memory_gib:.1f} GiB"
    )
    return 0


def write(record: OwnRecord, path: Path) -> None:
    """Make or replace the file of an own record."""
    row = asdict(record)
    row["note"] = row.pop("note")  # last
    row = {name: value for name, value in row.items() if value not in ("", [])}
    text = yaml.safe_dump(row, sort_keys=False, width=96)
    path.write_text(f"# Written by scripts/lab/record_anchor.py\n{text}", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    p = programs.parser(
        "record_anchor",
        "Write docs/measured/training/NAME.yaml from the metrics of a 50-step run.",
        epilog=EXAMPLE,
    )
    p.add_argument("--metrics", required=True, type=Path, metavar="FILE", help="metrics.jsonl")
    p.add_argument("--name", required=True, help="of the record: own_<model>_<backend>")
    p.add_argument("--hardware", required=True, metavar="TEXT", help='GPUs, as in "8 x H200"')
    p.add_argument("--command", required=True, metavar="LINE", help="the command that was run")
    p.add_argument("--commit", help="of the tree that ran (default: of this one)")
    p.add_argument(
        "--version",
        action="append",
        default=[],
        metavar="PACKAGE=VERSION",
        help=f"of a package; repeat (default: {', '.join(PACKAGES)} as installed here)",
    )
    p.add_argument("--note", default="", help="what a reader must know to compare")
    p.add_argument("--folder", type=Path, default=MEASURED, help="default: docs/measured/training")
    return p


def measured(args: argparse.Namespace) -> OwnRecord:
    """The record; ValueError if command, hardware and metrics contradict each other."""
    ranks, overrides = launch(args.command)
    cfg = load(overrides)
    validate(cfg, ranks)
    if cfg.run.steps != WINDOW[-1] or cfg.run.resume != "never":
        raise ValueError("--command is not of 50 steps from scratch: use run=bench")
    gpus = re.fullmatch(r"(\d+) x \S.*", args.hardware)
    if gpus is None or int(gpus[1]) != ranks:
        raise ValueError(f'--hardware "{args.hardware}" must be "{ranks} x <GPU>", as the command')
    steps = window(args.metrics)
    agree(cfg, ranks, steps)
    rates: dict[str, Any] = {}
    for key in ("tokens_per_second_per_gpu", "tflops_per_gpu", "step_time"):
        values = [step[key] for step in steps]
        rates[key] = _rounded(statistics.fmean(values), 6)
        rates[f"{key}_sd"] = _rounded(statistics.stdev(values), 3)
    last = steps[-1]
    return OwnRecord(
        **described(cfg, ranks, overrides),
        **rates,
        system=f"Phalanx, experts {backend(cfg, args.metrics)}",
        date=datetime.fromtimestamp(last["time"], UTC).date().isoformat(),
        hardware=args.hardware,
        gpus=ranks,
        command=" ".join(args.command.split()),
        commit=args.commit or commit(),
        versions=versions(args.version),
        loss_at_50=_rounded(last["loss"], 6),
        load_max_at_50=_rounded(last["load_max"], 4),
        rank_load_at_50=_rounded(last["rank_load"], 4) if "rank_load" in last else None,
        dead_experts_at_50=last["dead_experts"],
        reruns=last["reruns"],
        capacity_factor=_rounded(last["capacity_factor"], 4),
        peak_memory_gib=round(max(step["memory"] for step in steps), 2),
        note=args.note,
    )


def backend(cfg: Config, path: Path) -> str:
    """Backend of the experts; the metrics tell what `auto` took."""
    chosen = cfg.kernels.backend
    if chosen == "auto":
        chosen = start_facts(path).get("experts", chosen)
    if chosen == "auto":
        raise ValueError(f"--metrics {path} do not tell what auto took: add kernels= to --command")
    return chosen


def window(path: Path) -> list[dict[str, Any]]:
    by_step = {record["step"]: record for record in read(path) if "step_time" in record}
    if missing := [str(step) for step in WINDOW if step not in by_step]:
        raise ValueError(f"--metrics {path} lacks steps {', '.join(missing)}: use run=bench")
    if "memory_total" not in by_step[WINDOW[0]]:
        raise ValueError(f"--metrics {path} are of a run without a GPU")
    steps = [by_step[step] for step in WINDOW]
    for step in steps:
        if wrong := [name for name in _NUMBERS if not is_finite(step.get(name))]:
            raise ValueError(
                f"--metrics {path} has no number for {wrong[0]} at step {step['step']}"
            )
    return steps


_NUMBERS = ("loss", "step_time", "tokens_per_second_per_gpu", "tflops_per_gpu", "memory")


def agree(cfg: Config, ranks: int, steps: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless the rates match the command."""
    tokens = cfg.data.global_batch * cfg.data.sequence_length
    flops = flops_per_token(cfg.model, cfg.data.sequence_length)
    for step in steps:
        rate = step["tokens_per_second_per_gpu"]
        seen = {
            "tokens a step": (rate * step["step_time"] * ranks, tokens),
            "TFLOP/s a GPU": (step["tflops_per_gpu"], rate * flops / 1e12),
        }
        for quantity, (value, due) in seen.items():
            if abs(value / due - 1) > TOLERANCE:
                raise ValueError(
                    f"step {step['step']} has {value:,.1f} {quantity} where the command gives "
                    f"{due:,.1f}: the metrics are of another run"
                )


def described(cfg: Config, ranks: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Fields that follow from the command."""
    p, r = cfg.parallel, cfg.run
    of_model = [text for text in overrides if text.startswith("model.")]
    sizes = f"TP{p.tensor} CP{p.context} PP{p.pipeline} VP{p.virtual_pipeline}"
    sizes += f" EP{expert_parallel_size(cfg, ranks)} DP{data_parallel_size(cfg, ranks)}"
    return {
        "model": cfg.model.name,
        # Routing has a field of its own.
        "overrides": [text for text in of_model if text.split("=")[0] not in _CHOICE],
        "dtype": cfg.precision.recipe,
        "sequence_length": cfg.data.sequence_length,
        "micro_batch": cfg.data.micro_batch,
        "global_batch": cfg.data.global_batch,
        "layout": sizes + _memory("recompute", r.recompute) + _memory("offload", r.offload),
        "routing": _routing(cfg),
        "data": "mock" if cfg.data.source == "synthetic" else "real",
    }


_CHOICE = ("model.moe.router.force_balance", "model.moe.router.replay")


def _routing(cfg: Config) -> str:
    router = cfg.model.moe.router
    return "forced" if router.force_balance else "replayed" if router.replay else "natural"


def _memory(quantity: str, names: Sequence[str]) -> str:
    return f", {quantity} {' '.join(names)}" if names else ""


def versions(words: Sequence[str]) -> dict[str, str]:
    """Versions from words PACKAGE=VERSION, or those installed here."""
    if not words:
        installed = {dist.name.lower().replace("_", "-") for dist in metadata.distributions()}
        return {name: metadata.version(name) for name in PACKAGES if name in installed}
    if wrong := [text for text in words if not re.fullmatch(r"[^=]+=[^=]+", text)]:
        raise ValueError(f"--version {wrong[0]}: expected PACKAGE=VERSION")
    return dict(text.split("=") for text in words)


def commit() -> str:
    """Short commit of this tree, with a + if it has uncommitted changes."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        completed = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        raise ValueError("this is no git checkout: say --commit") from None
    return completed.stdout.strip()


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


if __name__ == "__main__":
    sys.exit(main())
