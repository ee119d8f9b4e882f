"""Many random kills: the run always resumes, loses little, and ends like an undisturbed one.

python -m pytest -m slow -s tests/end_to_end/faults/test_soak.py
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from phalanx.parallel.fault.watchdog import LOST
from tests.support.launch import Launch
from tests.support.runs import TINY, before_step, exact, records, run

KILLS, STEPS, INTERVAL, WORLD, SEED = 20, 200, 10, 2, 7
COMMAND = [
    *TINY,
    "data=synthetic",
    *[f"run.steps={STEPS}", f"run.save_interval={INTERVAL}", "parallel.timeout=20"],
]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_soon(delay: float) -> None:
    threading.Timer(delay, kill).start()


@contextmanager
def killed(rank: int, *, only: int, step: int, delay: float, saving: str) -> Iterator[None]:
    """One rank dies `delay` seconds into step `step`, or where its first save calls `saving`."""
    if rank != only:
        act: Any = nullcontext()
    elif saving:
        import phalanx.parallel.checkpoint.checkpointer  # noqa: F401  (so that there is something to replace)

        act = mock.patch(saving, side_effect=lambda *args, **kwargs: kill())
    else:
        act = before_step(step, partial(kill_soon, delay))
    with act:
        yield


def last_step(folder: Path) -> int:
    return records(folder)[-1]["step"] if (folder / "metrics.jsonl").exists() else 0


def newest(folder: Path) -> int:
    saved = [int(p.name[5:]) for p in (folder / "checkpoints").glob("step_????????")]
    return max(saved, default=0)


@pytest.mark.slow
@pytest.mark.dist
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    ranks = run(WORLD, [*COMMAND, f"run.dir={tmp_path / 'straight'}"])
    assert [rank.code for rank in ranks] == [0] * WORLD

    rng, folder, began = random.Random(SEED), tmp_path / "killed/run", time.monotonic()
    command = [*COMMAND, f"run.dir={tmp_path / 'killed'}"]
    kills: list[dict[str, Any]] = []
    while len(kills) < KILLS:
        start = newest(folder)
        # In the end there must be steps left for the kills to come.
        room = min(2 * INTERVAL, max(1, (STEPS - start) - (KILLS - len(kills))))
        # Rank 0 alone writes the manifest and renames.
        where, only = rng.choice(
            [
                ("", 0),
                ("", 1),
                ("", 0),
                ("", 1),
                ("phalanx.parallel.checkpoint.writer._write", rng.randrange(WORLD)),
                ("phalanx.parallel.checkpoint.commit.commit", 0),
            ]
        )
        if start + INTERVAL >= STEPS:
            where = ""
        plan = {"only": only, "step": start + rng.randint(1, room), "delay": rng.random() * 0.05}
        with Launch(
            WORLD, command, tmp_path / "out", partial(killed, **plan, saving=where)
        ) as launch:
            codes = launch.wait(120)
            output = "".join(map(launch.output, range(WORLD)))
        assert codes[only] == -signal.SIGKILL and codes[1 - only] == LOST, (codes, output)
        reached, saved = last_step(folder), newest(folder)
        assert f"rank {only} " in output and 0 <= reached - saved <= INTERVAL, output
        separate = abs(launch.ended[0] - launch.ended[1])
        kills.append({"rank": only, "in": where.rpartition(".")[2] or "step", "at": reached})
        kills[-1] |= {"lost": reached - saved, "others_ended_after": round(separate, 2)}
    with Launch(WORLD, command, tmp_path / "out") as launch:
        assert launch.wait(300) == [0] * WORLD, launch.output(0)

    actual, expected = (exact(records(f)) for f in (folder, tmp_path / "straight/run"))
    assert len(actual) == STEPS and actual == expected
    figures = {
        "kills": len(kills),
        "in_saves": sum(kill["in"] != "step" for kill in kills),
        "steps": STEPS,
        "save_interval": INTERVAL,
        "steps_lost": sum(kill["lost"] for kill in kills),
        "most_steps_lost": max(kill["lost"] for kill in kills),
        "slowest_end_of_the_others_s": max(kill["others_ended_after"] for kill in kills),
        "seconds": round(time.monotonic() - began),
        "final_loss": actual[-1][1],
        "final_loss_undisturbed": expected[-1][1],
    }
    (tmp_path / "soak.json").write_text(json.dumps(figures | {"each": kills}, indent=1))
    print(json.dumps(figures, indent=1))
