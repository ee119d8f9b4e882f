"""Runs of a model in which every second layer has linear attention."""

from pathlib import Path

import pytest

from tests.support.runs import SMALL, exact, records, run, with_corpus

pytestmark = pytest.mark.dist

MODEL = [
    *["model=tiny_qwen3_next", "model.attention.head_dim=8", "model.attention.rotary_dim=4"],
    *["model.moe.shared_ffn=16", "model.linear_attention.full_attention_interval=2"],
    *["model.linear_attention.key_heads=2", "model.linear_attention.value_heads=4"],
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on real text."""
    data = with_corpus(tmp_path_factory.mktemp("corpus"))
    return [*SMALL, *data, "data.split='90,10'", *MODEL]


def test_a_run_learns_and_goes_on_bit_for_bit(corpus: list[str], tmp_path: Path) -> None:
    """On two ranks, in bf16, with packed documents: 12 steps, and the last 6 of them again."""
    command = [*corpus, "data.document_mask=true", "run.eval_interval=6", "run.eval_batches=2"]
    command += ["run.steps=12", "run.save_interval=6"]
    main, _ = run(2, [*command, f"run.dir={tmp_path / 'a'}"])
    assert main.code == 0, main.err
    (line,) = [line for line in main.out.splitlines() if line.startswith("  linear_attention")]
    assert line.split()[1:3] == ["torch", "auto"]
    saved = tmp_path / "a/run/checkpoints/step_00000006"
    repeated, _ = run(2, [*command, f"run.dir={tmp_path / 'b'}", f"run.resume={saved}"])
    assert "resumed from step 6" in repeated.out
    straight, again = (exact(records(tmp_path / name / "run")) for name in "ab")
    assert len(straight) == 12 and straight[6:] == again
    losses = [r["loss"] for r in records(tmp_path / "a" / "run") if "loss" in r]
    assert sum(losses[-3:]) < sum(losses[:3]) - 1.5


def test_a_checkpoint_changes_layout(corpus: list[str], tmp_path: Path) -> None:
    """Tensor and context parallel, two stages: the losses of one rank."""
    common = [*corpus, "precision=fp32", "parallel.capacity_factor=8", "data.micro_batch=2"]
    (straight,) = run(1, [*common, "run.steps=3", f"run.dir={tmp_path / 'a'}"])
    assert straight.code == 0, straight.err
    for steps, sizes in (
        (1, ["parallel.tensor=2"]),
        (2, ["parallel.context=2"]),
        (3, ["parallel.pipeline=2"]),
    ):
        command = [*common, *sizes, f"run.steps={steps}", f"run.dir={tmp_path / 'b'}"]
        ranks = run(2, command)
        assert [r.code for r in ranks] == [0, 0], ranks[0].err
    moved, stayed = (records(tmp_path / name / "run") for name in "ba")
    assert [r["step"] for r in moved] == [1, 2, 3]
    for key, rel in (("loss", 2e-5), ("mtp_loss", 2e-5), ("grad_norm", 2e-3)):
        assert [r[key] for r in moved] == pytest.approx([r[key] for r in stayed], rel=rel)
