"""Twenty kills of random ranks of four in captured steps: each is named, and the run goes on.

Runs resume from their checkpoints and end with the losses of an undisturbed one, bit for bit. Four
runs of five kills each. With `-n 4` they share the GPUs, which take turns: steps are slower than
alone; starts, which take most of the time, are not.
"""

import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from phalanx.parallel.fault.watchdog import LOST
from tests.end_to_end.faults.test_faults_gpu import TIMEOUT, Ranks
from tests.support.runs import exact, records

pytestmark = pytest.mark.gpu

RANKS, KILLS, STEPS, INTERVAL = 4, 5, 240, 20
MOST = 30
"""Steps that a run makes at most, after its first ones, before a rank is killed."""
LAYOUTS = {
    "expert": ["parallel.expert=4"],
    "stages": ["parallel.pipeline=2", "parallel.expert=2"],
    "tensor": ["parallel.tensor=2", "parallel.expert=4"],
    "collectives": ["parallel.expert=4", "parallel.dispatch=alltoall"],
}


def started(folder: Path, layout: str) -> Ranks:
    how = [f"run.steps={STEPS}", f"run.save_interval={INTERVAL}", "run.graph=full_iteration"]
    return Ranks(folder, ["train.py"], *how, *LAYOUTS[layout], count=RANKS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kills_of_random_ranks_change_nothing(layout: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < RANKS or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"needs {RANKS} Hopper GPUs")
    rng = random.Random(layout)
    running = [straight := started(tmp_path / "straight", layout)]
    try:
        # It ends before the others start: kernels that wait for a peer, whose GPU has another
        # process's turn, would make both slow.
        straight.until(lambda: None not in straight.codes(), 200)
        assert straight.codes() == [0] * RANKS, straight.output()
        for _ in range(KILLS):
            running.append(ranks := started(tmp_path / "killed", layout))
            before = ranks.steps()
            # Steps are captured from the third on.
            least = before + 5 + rng.randrange(MOST)
            ranks.until(lambda r=ranks, n=least: r.steps() >= n or any(r.codes()), 120)  # type: ignore[misc]
            assert ranks.codes() == [None] * RANKS, ranks.output()
            culprit = rng.randrange(RANKS)
            killed, pid = time.monotonic(), ranks.ranks[culprit].pid
            os.kill(pid, signal.SIGKILL)
            ranks.until(lambda r=ranks: None not in r.codes(), TIMEOUT + 40)  # type: ignore[misc]
            print(
                f"rank {culprit} of {layout} in step {ranks.steps()}: all ended after "
                f"{time.monotonic() - killed:.1f} s"
            )
            assert any(
                f"rank {culprit} ({socket.gethostname()}, pid {pid}) died" in line
                for line in ranks.reported()
            ), ranks.output()
            codes = ranks.codes()
            assert codes.pop(culprit) == -signal.SIGKILL, ranks.output()
            assert codes == [LOST] * (RANKS - 1), ranks.output()
        running.append(last := started(tmp_path / "killed", layout))
        last.until(lambda: None not in last.codes(), 200)
        assert last.codes() == [0] * RANKS, last.output()
        found, expected = (exact(records(ranks.folder)) for ranks in (last, straight))
        assert len(found) == STEPS and found == expected
    finally:
        for ranks in running:
            ranks.end()
