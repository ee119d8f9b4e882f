"""Weight gradients that wait for transfers between two GPUs are those of the backward pass."""

from pathlib import Path

import pytest

from tests.end_to_end.test_train_gpu import GRAPH, train
from tests.support.gpu_runs import RANKS

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "stages": ["parallel.pipeline=2"],
    "interleaved": ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
}
UNEVEN = {
    "tiny_gpt_oss": ["parallel.pipeline=2", "parallel.pipeline_layout='Ettt|tL'"],
    "tiny_deepseek": ["parallel.pipeline=2", "parallel.pipeline_layout='Ettt|tmL'"],
}
"""Stages of which the second has memory to hold a micro-batch's gradients longer."""
GIVEN = ["kernels=fused", "run.steps=8", "run.eval_interval=8", "run.eval_batches=2"]
GIVEN += ["parallel.capacity_factor=8"]


@pytest.mark.parametrize("layout", [*LAYOUTS, "uneven"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("model", ["tiny_gpt_oss", "tiny_deepseek"])
def test_bits_are_the_same(
    model: str, recipe: str, layout: str, tmp_path: Path, two_gpus: None
) -> None:
    """Eager and captured, against steps that compute them in the backward pass."""
    stages = LAYOUTS.get(layout) or UNEVEN[model]
    options = [f"model={model}", f"precision={recipe}", *GIVEN, *stages]
    runs = {
        name: train(tmp_path, name, *options, *more, ranks=RANKS)
        for name, more in {
            "never": ["parallel.delay_wgrad=off"],
            "eager": ["parallel.delay_wgrad=on"],
            "graph": ["parallel.delay_wgrad=on", GRAPH],
        }.items()
    }
    _same_bits(runs["never"], runs["eager"], runs["graph"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "given",
    [
        "model.tie_embeddings=true",
        "run.recompute=[norm,attention,expert_h]",
        "run.recompute=full run.offload=residual",
        "run.offload=[residual,expert_h]",
        "optim=muon optim.moments=bf16",
        "precision=fp8_block precision.wgrad=bf16",
    ],
)
def test_bits_with_other_knobs(given: str, layout: str, tmp_path: Path, two_gpus: None) -> None:
    options = ["model=tiny_deepseek", *GIVEN, GRAPH, *given.split(), *LAYOUTS[layout]]
    never = train(tmp_path, "never", *options, "parallel.delay_wgrad=off", ranks=RANKS)
    delayed = train(tmp_path, "delayed", *options, "parallel.delay_wgrad=on", ranks=RANKS)
    _same_bits(never, delayed)


def _same_bits(want: list[dict[str, float]], *others: list[dict[str, float]]) -> None:
    for steps in others:
        for name in ("loss", "grad_norm", "valid_loss", "mtp_loss"):
            assert [s.get(name) for s in steps] == [s.get(name) for s in want], name
