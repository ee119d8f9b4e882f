"""Runs over packed documents: layouts agree, resumes are bitwise, the start page says so."""

from pathlib import Path

import pytest

from tests.support.runs import DEEPSEEK, GPT_OSS, SMALL, exact, records, run, text, with_corpus
from tests.support.training import trained

pytestmark = pytest.mark.dist

MASK = ["data.document_mask=true", "data.sequence_length=16"]
WITHOUT_LOSS = [*DEEPSEEK, "model.moe.router.seq_aux_loss=0"]
WINDOWS = [
    *GPT_OSS,
    "model.moe.router.aux_loss=0",
    *["model.attention.window=6", "kernels.attention=reference"],
]
QWEN3_NEXT = [
    *["model=tiny_qwen3_next", "model.attention.head_dim=8", "model.attention.rotary_dim=4"],
    *["model.moe.shared_ffn=16", "model.linear_attention.full_attention_interval=2"],
]
QWEN3 = ["model=tiny", "model.attention.head_dim=8", "model.attention.qk_norm=true"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on short documents."""
    pieces = [list(full_run[i : i + 9 + i % 40]) for full_run in text() for i in range(0, 900, 45)]
    return [*SMALL, *with_corpus(tmp_path_factory.mktemp("corpus"), pieces), "data.split='90,10'"]


def test_a_run_stops_and_goes_on(corpus: list[str], tmp_path: Path) -> None:
    command = [*corpus, *WITHOUT_LOSS, *MASK, "run.eval_interval=4", "run.eval_batches=2"]
    command += ["run.steps=4", "run.save_interval=2"]
    main, _ = run(2, [*command, f"run.dir={tmp_path / 'a'}"])
    assert main.code == 0, main.err
    saved = tmp_path / "a/run/checkpoints/step_00000002"
    repeated, _ = run(2, [*command, f"run.dir={tmp_path / 'b'}", f"run.resume={saved}"])
    assert "resumed from step 2" in repeated.out
    straight, again = (exact(records(tmp_path / name / "run")) for name in "ab")
    assert len(straight) == 4 and straight[2:] == again
    lines = main.out.splitlines()
    (packed,) = [line for line in lines if line.startswith("  packing ")]
    assert " documents per sequence (most " in packed
    assert packed.endswith("of causal attention saved")
    (work,) = [line for line in lines if line.startswith("  work ")]
    assert work.endswith("per step, upper bound: attention over full sequences")
    assert max(map(len, (packed, work))) <= 100


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (WITHOUT_LOSS, [{"parallel.pipeline": 2}, {"parallel.context": 2}]),
        pytest.param(WITHOUT_LOSS, [{"parallel.tensor": 2}], marks=pytest.mark.slow),
        pytest.param(
            *(WINDOWS, [{"parallel.tensor": 2}, {"parallel.context": 2}]), marks=pytest.mark.slow
        ),
        pytest.param(QWEN3, [{"parallel.context": 2}], marks=pytest.mark.slow),
        (QWEN3_NEXT, [{"parallel.context": 2}]),
    ],
    ids=["deepseek", "deepseek tensor", "gpt_oss", "qwen3", "qwen3_next"],
)
def test_layouts_agree(corpus: list[str], model: list[str], layouts: list[dict[str, int]]) -> None:
    """Stages, tensor, context and data parallel ranks each see where documents end."""
    (blend,) = (x for x in corpus if x.startswith("data.blend="))
    overrides = [
        *(x for x in corpus if not x.startswith(("data=", "data.blend="))),
        *model,
        *["precision=fp32", "run.steps=2", "run.seed=3", "parallel.capacity_factor=16"],
        *["data.sequence_length=16", "data.micro_batch=2", "optim.eps=1e-2", "optim.lr=3e-2"],
    ]
    prefix = blend.removeprefix("data.blend=[").removesuffix("]")
    real = {"data.source": "indexed", "data.blend": [prefix]}
    masked = {**real, "data.document_mask": True, "optim.max_logit_every": 1}
    alone, without = trained(1, overrides, masked), trained(1, overrides, real)
    assert abs(without.series("loss")[1] - alone.series("loss")[1]) > 1e-3
    for sizes in layouts:
        other = trained(2, overrides, {**masked, **sizes})
        assert other.series("loss") == pytest.approx(alone.series("loss"), rel=5e-6)
        assert other.series("max_logit") == pytest.approx(alone.series("max_logit"), rel=2e-5)
        if model in (WITHOUT_LOSS, QWEN3_NEXT):
            ahead = alone.series("mtp_loss")
            assert other.series("mtp_loss") == pytest.approx(ahead, rel=5e-6) and min(ahead) > 0
        assert other.series("grad_norm") == pytest.approx(alone.series("grad_norm"), rel=5e-5)
        assert other.valid_loss == pytest.approx(alone.valid_loss, rel=5e-6)
