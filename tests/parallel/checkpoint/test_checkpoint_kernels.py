"""Weights in a checkpoint are canonical: the same names and bytes whatever kernels trained them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.checkpoint.checkpoints import assert_equal, stored
from tests.support.runs import GPT_OSS, SMALL, records, run
from tests.support.scheduling import mostly_slow

MODELS = {
    "tiny": ["model=tiny", "model.attention.head_dim=8"],
    "tiny_gpt_oss": GPT_OSS,
}
KERNELS = ["torch", "reference", "megatron", "torch"]


@contextmanager
def saved_before_step_3(rank: int) -> Iterator[None]:
    from phalanx.moe.run.trainer import Trainer

    original = Trainer._train_step

    def step(self: Any) -> bool:
        if self.step == 2:
            self.saves(2)
        return original(self)

    Trainer._train_step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer._train_step = original  # type: ignore[method-assign]


@pytest.mark.extras
@pytest.mark.dist
@mostly_slow("model", MODELS, "tiny_gpt_oss")
def test_any_kernels_go_on_from_the_weights_of_any_other(tmp_path: Path, model: str) -> None:
    """Each saves what it loaded, and finds the next loss that the first one found."""
    before, first, losses = "never", None, []
    for i, kernels in enumerate(KERNELS):
        folder = tmp_path / str(i)
        command = [*SMALL, *MODELS[model], f"kernels={kernels}", "data=synthetic", "run.steps=3"]
        command += ["precision=fp32", "run.save_interval=-1", f"run.resume={before}"]
        (main,) = run(1, [*command, f"run.dir={folder}"], saved_before_step_3)
        assert main.code == 0, main.err
        saved = folder / "run/checkpoints/step_00000002"
        losses.append(records(folder / "run")[-1]["loss"])
        first = first or stored(saved)
        assert_equal(first, stored(saved))
        before = str(saved)
    assert len(first or {}) > 20 and any(".experts." in name for name in first or {})
    assert losses == pytest.approx([losses[0]] * len(KERNELS), rel=1e-6)
