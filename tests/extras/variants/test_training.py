"""Runs of the trainer with latent experts."""

from pathlib import Path

import pytest

from tests.support.runs import TINY, exact, records, run, with_corpus

pytestmark = pytest.mark.dist

RUNS = {
    "latent": (2, ["model.variants=[latent:16]", "model.moe.shared_ffn=16", "optim=muon"]),
    "context": (2, ["model.variants=[latent:16]", "parallel.context=2"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_and_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """In bf16: 12 steps, and the last 6 of them again."""
    ranks, more = RUNS[name]
    command = [*TINY, *more, *with_corpus(tmp_path), "data.split='90,10'", "optim.lr=1e-2"]
    command += ["optim.min_lr=0", "run.eval_interval=6", "run.eval_batches=2"]
    command += ["run.steps=12", "run.save_interval=6"]
    main, *_ = run(ranks, [*command, f"run.dir={tmp_path / 'a'}"])
    assert main.code == 0, main.err
    saved = tmp_path / "a/run/checkpoints/step_00000006"
    repeated, *_ = run(ranks, [*command, f"run.dir={tmp_path / 'b'}", f"run.resume={saved}"])
    assert "resumed from step 6" in repeated.out, repeated.err
    straight, again = (exact(records(tmp_path / x / "run")) for x in "ab")
    assert len(straight) == 12 and straight[6:] == again
    losses = [r["loss"] for r in records(tmp_path / "a" / "run") if "loss" in r]
    assert sum(losses[-3:]) < sum(losses[:3]) - 1.5


def test_a_checkpoint_of_two_expert_ranks_goes_on_with_one(tmp_path: Path) -> None:
    common = [*TINY, "model.variants=[latent:16]", "precision=fp32", "data.micro_batch=2"]
    common += ["parallel.capacity_factor=8", "optim.lr=1e-3"]
    (straight,) = run(1, [*common, "run.steps=2", f"run.dir={tmp_path / 'a'}"])
    assert straight.code == 0, straight.err
    for steps, ranks in ((1, 2), (2, 1)):
        ended = run(ranks, [*common, f"run.steps={steps}", f"run.dir={tmp_path / 'b'}"])
        assert {r.code for r in ended} == {0}, ended[0].err
    moved, stayed = (records(tmp_path / name / "run") for name in "ba")
    for key, rel in (("loss", 2e-5), ("grad_norm", 2e-3)):
        assert [r[key] for r in moved] == pytest.approx([r[key] for r in stayed], rel=rel)


def test_a_checkpoint_writes_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from phalanx.scripts import sample

    command = [*TINY, "model.variants=[latent:16]", "run.steps=2", f"run.dir={tmp_path}"]
    (ended,) = run(1, command)
    assert ended.code == 0, ended.err
    given = [str(tmp_path / "run"), "--prompt", "def ", "--tokens", "4", "--device", "cpu"]
    assert sample.main(given) == 0
    assert "def " in capsys.readouterr().out
