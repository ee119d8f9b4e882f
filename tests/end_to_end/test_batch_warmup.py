"""Runs whose global batch grows: sizes of steps, resumes, and a schedule in tokens."""

from pathlib import Path

import pytest

from tests.support.runs import exact, records, run
from tests.support.tiny_runs import TINY

pytestmark = pytest.mark.dist

WARMUP = "data.batch_warmup=[4:160,8:400]"
SIZES = [4, 4, 4, 8, 8, 16, 16]
"""Sequences of 16 tokens in each step: 12 samples before 160 tokens are passed, then 28."""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("cache")
    return [*TINY, f"data.cache={cache}", "data.micro_batch=2", "data.global_batch=16"]


def test_the_batch_grows_and_a_resume_goes_on_bit_for_bit(
    command: list[str], tmp_path: Path
) -> None:
    args = [*command, WARMUP, "run.eval_interval=7", "run.eval_batches=1"]
    args += ["run.steps=7", "run.save_interval=4"]
    main, _ = run(2, [*args, f"run.dir={tmp_path / 'a'}"])
    assert main.code == 0, main.err
    told = [line for line in main.out.splitlines() if "global batch" in line]
    assert told == [f"-- the global batch is {size} sequences" for size in (4, 8, 16)]
    page = "batch 16 = 2 x 4 micro-batches x 2 ranks, after 4 up to 160, 8 up to 400 tokens"
    assert page in main.out and "length  7 steps, 960 tokens" in main.out
    straight = records(tmp_path / "a/run")
    assert [r["tokens"] for r in straight] == [16 * sum(SIZES[: n + 1]) for n in range(7)]
    assert [r["labels"] for r in straight] == [16 * size for size in SIZES]
    assert straight[-1]["valid_labels"] == 16 * 16
    saved = tmp_path / "a/run/checkpoints/step_00000004"
    main, _ = run(2, [*args, f"run.dir={tmp_path / 'b'}", f"run.resume={saved}"])
    assert main.code == 0, main.err
    assert exact(records(tmp_path / "b/run")) == exact(straight)[4:]


def test_steps_of_a_size_are_those_of_a_run_of_that_size(
    command: list[str], tmp_path: Path
) -> None:
    args = [*command, "optim.decay_steps=20", "run.steps=3", "run.save_interval=-1"]
    for name, size in (("warmup", [WARMUP]), ("small", ["data.global_batch=4"])):
        (main,) = run(1, [*args, *size, f"run.dir={tmp_path / name}"])
        assert main.code == 0, main.err
    grown, small = (exact(records(tmp_path / name / "run")) for name in ("warmup", "small"))
    assert grown == small


def test_the_start_page_of_a_resume_has_the_tokens_of_all_steps(
    command: list[str], tmp_path: Path
) -> None:
    """Steps before the resume had batches of another size: smaller ones, and then larger ones."""
    args = [*command, f"run.dir={tmp_path}"]
    for steps, size, samples in ((2, 4, 8), (4, 16, 40), (6, 4, 48)):
        (main,) = run(1, [*args, f"run.steps={steps}", f"data.global_batch={size}"])
        assert main.code == 0, main.err
        assert f"length  {steps} steps, {16 * samples} tokens" in main.out
        assert records(tmp_path / "run")[-1]["tokens"] == 16 * samples


def test_a_schedule_in_tokens_is_that_of_its_steps(command: list[str], tmp_path: Path) -> None:
    """The warm-up ends with step 4, which reaches 320 tokens, and the decay with step 7."""
    args = [*command, WARMUP, "run.steps=7", "run.save_interval=-1"]
    given = {
        "steps": ["optim.warmup_steps=4", "optim.decay_steps=7"],
        "tokens": ["optim.warmup_tokens=300", "optim.decay_steps=0", "optim.decay_tokens=900"],
    }
    for name, ends in given.items():
        (main,) = run(1, [*args, *ends, f"run.dir={tmp_path / name}"])
        assert main.code == 0, main.err
    steps, tokens = (records(tmp_path / name / "run") for name in given)
    assert exact(tokens) == exact(steps)
    rates = [record["lr"] for record in tokens]
    assert rates == [record["lr"] for record in steps]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2]) and rates[6] < rates[5] < 1e-2
