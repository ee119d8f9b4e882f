"""Runs as files, for the tests of a folder."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FACTS = {"event": "start", "at": 0, "run": "one", "model": "tiny", "ranks": 2}
FACTS |= {"device": "CPU process"}


def step(number: int, **more: Any) -> dict[str, Any]:
    """A record of a step, one second after the one before."""
    record = {"step": number, "tokens": 100 * number, "loss": 10.0 - number, "grad_norm": 1.0}
    record |= {
        "lr": 0.1,
        "tokens_per_second_per_gpu": 50.0,
        "goodput": 0.5,
        "time": 1000.0 + number,
    }
    record |= {"layers": {"2": [1.5, 0], "10": [2.0 + number, 1]}}
    return record | {"seconds": {"start": 2.0, "training": 1.0 * number}} | more


def write(folder: Path, records: Sequence[dict[str, Any]], mode: str = "a") -> Path:
    """Append records to metrics.jsonl of a run, or write it anew; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return folder / "metrics.jsonl"


def plan(folder: Path, steps: int, *phases: str) -> None:
    """The config.yaml of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"steps": steps, "phases": [{"name": name} for name in phases]}
    (folder / "config.yaml").write_text(f"# a command\n{json.dumps({'run': run})}\n")


def live(numbers: range, ago: float = 0.0) -> list[dict[str, Any]]:
    """Steps of a second each, of which the last ended `ago` seconds before now."""
    end = time.time() - ago
    return [step(n, time=round(end - (numbers[-1] - n), 3)) for n in numbers]
