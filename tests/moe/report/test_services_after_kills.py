"""Records that a killed run's services had not written yet: a run that goes on sends them again.

With the services' own libraries, in processes that kill themselves.
"""

import math
import os
import signal
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from phalanx.configs.schema import Config
from phalanx.moe.report.loggers import read
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.report.service import tag
from phalanx.moe.report.trackers import rows


def _log(folder: Path, step: int, last: int, flushed: int, end: str) -> None:
    cfg = Config()
    cfg.run.wandb, cfg.run.trackers = "offline", ["tensorboard"]
    metrics = Metrics(folder, cfg, True, step=step)
    for n in range(step + 1, last + 1):
        wide = {f"balance/layer_{i}": n + i / 7 for i in range(40)}
        metrics.log({"step": n, "loss": 1 / n, "step_time": 0.5, "grad_norm": math.inf} | wide)
        if n % 10 == 0:
            metrics.log({"step": n, "valid_loss": 2 / n})
        if n == flushed:
            metrics.flush()
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    metrics.close()


def launch(folder: Path, step: int, last: int, *, flushed: int = 0, end: str = "kill") -> None:
    """Log from `step` to `last` in a process of its own, which may kill itself.

    It is forked with the libraries, whose imports take most of the time of a launch.
    """
    import wandb  # noqa: F401
    from torch.utils import tensorboard  # noqa: F401

    process = get_context("fork").Process(target=_log, args=(folder, step, last, flushed, end))
    process.start()
    process.join(300)
    assert process.exitcode == (-signal.SIGKILL if end == "kill" else 0)


def of_wandb(folder: Path) -> list[list[dict[str, Any]]]:
    """Rows of each launch."""
    return [list(rows(path)) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def of_tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def each_once(folder: Path) -> None:
    """Both services have every record of metrics.jsonl, with its numbers and time, once."""
    records = read(folder / "metrics.jsonl")
    found = [row for launch in of_wandb(folder) for row in launch]
    validations = [r["step"] for r in records if "valid_loss" in r]
    assert Counter(row["step"] for row in found) == Counter(
        [r["step"] for r in records] + validations
    )
    by_step: dict[int, dict[str, Any]] = {}
    for row in found:
        by_step.setdefault(row["step"], {}).update(row)
    for record in records:
        row, tags = by_step[record["step"]], {tag(k): v for k, v in record.items()}
        assert row["train/loss"] == tags["train/loss"]
        assert row["moe/layer_39"] == tags["moe/layer_39"]
        assert row.get("valid/loss") == tags.get("valid/loss")
        assert row["_timestamp"] == record["time"] and row["train/grad_norm"] == math.inf
    for name, key in (("train/loss", "loss"), ("valid/loss", "valid_loss")):
        expected = [(r["step"], pytest.approx(r[key])) for r in records if key in r]
        assert of_tensorboard(folder, name) == expected


def tear(folder: Path, part: float) -> None:
    """Leave only a part of W&B's newest file: how much a kill leaves is a matter of milliseconds.

    The process that writes it may live a little longer: it keeps the file that was there.
    """
    path = max(folder.glob("wandb/offline-run-*/*.wandb"))
    content = path.read_bytes()
    torn = path.with_suffix(".torn")
    torn.write_bytes(content[: max(7, int(part * len(content)))])
    torn.replace(path)


def test_what_a_kill_lost_is_sent_by_the_next_launch(tmp_path: Path) -> None:
    """W&B has a part of the first launch, and nothing of the second."""
    launch(tmp_path, 0, 45)
    tear(tmp_path, 0.7)
    (first,) = of_wandb(tmp_path)
    there = [row["step"] for row in first]
    assert there == sorted(there) and 10 < there[-1] < 40
    launch(tmp_path, 40, 43, flushed=41)
    tear(tmp_path, 0)
    launch(tmp_path, 43, 46, end="close")
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [*range(1, 47)]
    each_once(tmp_path)
    launch(tmp_path, 46, 47, end="close")
    assert [row["step"] for row in of_wandb(tmp_path)[-1]] == [47], "nothing was lacking"
    each_once(tmp_path)


def test_a_service_that_is_asked_for_later_gets_the_whole_run(tmp_path: Path) -> None:
    launch(tmp_path, 0, 12, end="close")
    for path in (*tmp_path.glob("wandb*/*"), *tmp_path.glob("*_sent"), tmp_path / "wandb_id"):
        path.rename(tmp_path / f"away_{path.name}")
    (tmp_path / "tensorboard").rename(tmp_path / "away")
    launch(tmp_path, 12, 13, end="close")
    each_once(tmp_path)


def test_steps_that_are_done_again_are_not_taken_for_sent(tmp_path: Path) -> None:
    """The first launch got to step 30 and is gone on from at 10."""
    launch(tmp_path, 0, 30, end="close")
    launch(tmp_path, 10, 14)
    launch(tmp_path, 14, 16, end="close")
    again = [row["step"] for launched in of_wandb(tmp_path)[1:] for row in launched]
    assert again == [*range(11, 17)]
    assert [step for step, _ in of_tensorboard(tmp_path, "train/loss")] == [*range(1, 17)]


def test_a_new_run_sends_nothing_of_the_one_before(tmp_path: Path) -> None:
    launch(tmp_path, 0, 5)
    launch(tmp_path, 0, 2, end="close")
    assert [row["step"] for row in of_wandb(tmp_path)[-1]] == [1, 2]
    assert [step for step, _ in of_tensorboard(tmp_path, "train/loss")] == [1, 2]


def test_a_rollback_takes_steps_from_tensorboard(tmp_path: Path) -> None:
    cfg = Config()
    cfg.run.trackers = ["tensorboard"]
    metrics = Metrics(tmp_path, cfg, True)
    for step in (1, 2, 3, 4):
        metrics.log({"step": step, "loss": float(step)})
    metrics.flush()
    metrics.rewind(2)
    assert (tmp_path / "tensorboard_sent").read_text() == "2\n"
    metrics.log({"step": 3, "loss": 30.0})
    metrics.close()
    assert of_tensorboard(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]
