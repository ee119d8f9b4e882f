"""torchrun's report ends with the reason of ours, whichever rank it takes for the first."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.runs import TINY
from tests.support.torchrun import Torchrun

COMMAND = ["train.py", *TINY, "data=synthetic", "run.steps=4", "run.save_interval=-1"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("more", "code", "reason"),
    [
        (["optim.lr=abc"], 2, "error: optim.lr=abc: expected a number, as in optim.lr=0.003"),
        (
            ["run.device=auto", "kernels=fused"],
            2,
            "error: kernels.backend=fused cannot run here: needs CUDA; use "
            "kernels.backend=reference or kernels.backend=auto",
        ),
        (["run.resume={0}/step_9"], 44, "error: run.resume={0}/step_9 is no valid checkpoint: "),
        (["run.inject=[nan@2]", "run.bad_steps=stop"], 43, "error: "),
    ],
)
def test_the_last_lines_of_a_launch_have_the_reason(
    more: Sequence[str], code: int, reason: str, tmp_path: Path
) -> None:
    more = [word.format(tmp_path) for word in more]
    with Torchrun(2, [*COMMAND, f"run.dir={tmp_path / 'runs'}", *more], tmp_path) as launch:
        assert launch.wait() == 1
    *_, last = launch.err().split("Root Cause (first observed failure):")
    assert f"exitcode  : {code} (pid" in last
    told = last.partition("traceback : ")[2]
    assert reason.format(tmp_path) in told
    assert told.startswith("error: ") and len(told.splitlines()) == 2  # and a line of =


@pytest.mark.dist
def test_every_rank_leaves_the_reason_of_one_that_fails_alone(tmp_path: Path) -> None:
    """torchrun reports the rank that ends first: the one at fault or another one."""
    more = [f"run.dir={tmp_path / 'runs'}", "run.inject=['raise@2:rank1']"]
    logs = tmp_path / "logs"
    with Torchrun(2, [*COMMAND, *more], tmp_path, ["--log-dir", str(logs)]) as launch:
        assert launch.wait() == 1
    cause = "run.inject=raise@2:rank1"
    assert cause in launch.err().partition("Root Cause (first observed failure):")[2]
    told = [path.read_text() for path in sorted(logs.rglob("error.json"))]
    assert len(told) == 2 and all(cause in text for text in told)
    assert "error: rank 1 " in told[0] and f"Injected: {cause} (rank 1)" in told[1]


@pytest.mark.dist
def test_a_report_of_a_killed_rank_has_what_the_others_say(tmp_path: Path) -> None:
    more = [f"run.dir={tmp_path / 'runs'}", "run.inject=['kill@2:rank1']"]
    with Torchrun(2, [*COMMAND, *more], tmp_path) as launch:
        assert launch.wait() == 1
    report = launch.err().partition("Failures:")[2]
    assert "Signal 9 (SIGKILL) received" in report and "exitcode  : 45 (pid" in report
    assert "traceback : error: rank 1 " in report
