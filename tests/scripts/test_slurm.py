"""scripts/slurm.sbatch with stand-ins for srun, scontrol and the trainer on the PATH."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.parallel.checkpoint import commit, remote  # noqa: F401  (the latter for addresses)
from phalanx.parallel.object_store import Remote
from tests.support import s3
from tests.support.runs import write_checkpoint
from tests.support.scheduling import mostly_slow, slow

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts/slurm.sbatch"

SRUN = """#!/usr/bin/env bash
# Two tasks on each of two nodes; the largest exit code, as srun's.
while [[ $1 == -* ]]; do echo "$1" >>"$SEEN/srun"; shift; done
code=0
for rank in 0 1 2 3; do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@" || { c=$?; code=$((c > code ? c : code)); }
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
  "show hostnames") printf 'node7\\nnode8\\n' ;;
  "show job") echo "   JobState=$STATE Reason=None" ;;
  *) echo "$*" >>"$SEEN/scontrol" ;;
esac
"""
PYTHON = f"""#!/usr/bin/env bash
[ "$1" = train.py ] || exec {sys.executable} "$@"
echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT ${{*:2}}" >>"$SEEN/ranks"
if [ -n "${{SAVES:-}}" ]; then
  mkdir -p "$RUN/checkpoints"
  cp -rT "$SEEN/saved" "$RUN/checkpoints/step_$SAVES"
fi
exit "$CODE"
"""


class Job:
    """A Slurm job that may be requeued."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.restarts = folder, 0
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(text)
            program.chmod(0o755)
        write_checkpoint(folder / "saved")

    def start(
        self, code: int, *overrides: str, saves: str = "", state: str = "RUNNING"
    ) -> subprocess.CompletedProcess[str]:
        """Run the script: all ranks save a checkpoint if told to, and end with `code`."""
        slurm = {
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_JOB_ID": "30042",
            "SLURM_RESTART_COUNT": str(self.restarts),
        }
        stand_ins = {"SEEN": str(self.folder), "CODE": str(code), "SAVES": saves, "STATE": state}
        path = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PHALANX_PYTHON": str(self.folder / "bin/python"),
            "RUN": str(self.folder / "runs/tiny"),
        }
        self.restarts += 1
        return subprocess.run(
            ["bash", str(SCRIPT), f"run.dir={self.folder / 'runs'}", *overrides],
            env=os.environ | slurm | stand_ins | path,
            capture_output=True,
            text=True,
        )

    def seen(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_ranks_know_their_place(job: Job) -> None:
    finished = job.start(0, "run.steps=7")
    assert (finished.returncode, finished.stderr) == (0, "")
    arguments = f"run.dir={job.folder / 'runs'} run.steps=7 run.requeue_code=85"
    assert job.seen("ranks") == [
        f"{rank} {rank % 2} 4 node7 20042 {arguments}" for rank in range(4)
    ]
    assert job.seen("scontrol") == []


@pytest.mark.parametrize(("code", "trained"), [(0, 4), (1, 0), *slow((2, 0))])
def test_a_job_may_check_the_cluster_first(
    job: Job, monkeypatch: pytest.MonkeyPatch, code: int, trained: int
) -> None:
    python = job.folder / "bin/python"
    check = '[ "$1" = scripts/check_cluster.py ] && { echo "$RANK" >>"$SEEN/checked"; exit %d; }'
    python.write_text(PYTHON.replace("[", f"{check % code}\n[", 1))
    monkeypatch.setenv("PHALANX_CHECK", "1")
    assert job.start(0).returncode == code
    assert job.seen("checked") == ["0", "1", "2", "3"]
    assert len(job.seen("ranks")) == trained and job.seen("scontrol") == []


def test_a_stopped_job_queues_again_with_the_same_command(job: Job) -> None:
    """The run itself knows that it has started (parallel.checkpoint.start)."""
    finished = job.start(85, "run.resume=never", saves="00000005")
    assert finished.returncode == 0 and "newest checkpoint: step_00000005" in finished.stderr
    assert job.seen("scontrol") == ["requeue 30042"]
    assert "an earlier launch has started this run" in job.start(0, "run.resume=never").stderr
    assert len({line.split(maxsplit=5)[-1] for line in job.seen("ranks")}) == 1


def test_checkpoints_in_an_object_store_are_progress_too(job: Job) -> None:
    root = Remote(f"s3://{s3.BUCKET}/slurm")
    with s3.credentials(s3.endpoint()):
        command = [f"run.checkpoints={root}", "run.resume=never", "data=synthetic"]
        folder = commit.folder_of(root / "tiny", 5)
        write_checkpoint(folder)
        finished = job.start(85, *command)
    assert finished.returncode == 0 and f"newest checkpoint: {folder.name}" in finished.stderr


def test_without_a_new_checkpoint_a_job_gives_up(job: Job) -> None:
    assert job.start(85).returncode == 0
    job.start(1, saves="00000001")  # progress: the count starts again
    for code in (85, 137, 45):
        assert job.start(code, saves="00000001").returncode == 0
    assert job.seen("scontrol") == ["requeue 30042"] * 5
    finished = job.start(1, saves="00000001")
    assert finished.returncode == 1 and "3 requeues brought no new checkpoint" in finished.stderr
    assert len(job.seen("scontrol")) == 5


@pytest.mark.parametrize(
    ("override", "code", "error"),
    [
        ("data=indexed data.blend=[nowhere/text]", 2, "nowhere/text.bin does not exist"),
        ("run.resume=nowhere", 44, "run.resume=nowhere is no valid checkpoint"),
        *slow(("run.stesp=3", 2, "error: run.stesp: no such knob; did you mean run.steps?")),
    ],
)
def test_mistakes_end_it_before_a_rank_starts(
    job: Job, override: str, code: int, error: str
) -> None:
    finished = job.start(0, *override.split())
    assert finished.returncode == code and error in finished.stderr and finished.stdout == ""
    assert job.seen("ranks") == [] and job.seen("scontrol") == []


@mostly_slow("code", [2, 43, 44], 43)
def test_an_error_that_would_come_again_ends_the_job(job: Job, code: int) -> None:
    assert job.start(code).returncode == code
    assert job.seen("scontrol") == []


def test_a_cancelled_job_does_not_come_back(job: Job) -> None:
    assert job.start(85, saves="00000005", state="CANCELLED").returncode == 85
    assert job.seen("scontrol") == []


def test_shellcheck_finds_nothing() -> None:
    beside = str(Path(sys.executable).parent)
    shellcheck = shutil.which("shellcheck", path=f"{beside}:{os.environ['PATH']}")
    assert shellcheck, "pip install -e '.[dev]'"
    finished = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout
