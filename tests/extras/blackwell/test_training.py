"""Whole tiny models train on a CPU with the experts of `kernels=cudnn`, and keep their checkpoints.

The fake stands in the place of the package; everything else is what runs on a GPU.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.parallel.checkpoint.checkpoints import assert_equal, stored
from tests.parallel.checkpoint.test_checkpoint_kernels import MODELS, saved_before_step_3
from tests.support.fake_cudnn.training import experts_on_cpu
from tests.support.runs import SMALL, records, run
from tests.support.scheduling import slow

SIZES = ["model.hidden=64", "model.moe.ffn=64", "run.save_interval=-1"]


Losses = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """(ranks, kernels, model, precision) -> those of the steps of a run, trained once for all
    tests, whose start page names the experts."""

    @functools.cache
    def of(world: int, kernels: str, model: str, precision: str = "bf16") -> torch.Tensor:
        folder = tmp_path_factory.mktemp("losses")
        # With small steps no token changes its experts over the noise of bf16.
        command = [*SMALL, *SIZES, *MODELS[model], "optim.lr=1e-3", f"precision={precision}"]
        command += ["run.steps=4", f"run.dir={folder}"]
        cudnn = kernels == "cudnn"
        command.append("kernels=auto" if cudnn else f"kernels={kernels}")
        main, *_ = run(world, command, experts_on_cpu if cudnn else None)
        assert main.code == 0, main.err
        assert re.search(rf"grouped_mlp +{kernels}\b", main.out)
        return torch.tensor([r["loss"] for r in records(folder / "run") if "grad_norm" in r])

    return of


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "world"), [("tiny_gpt_oss", 2), *slow(("tiny_gpt_oss", 1), ("tiny", 1), ("tiny", 2))]
)
def test_losses_are_those_of_the_reference(losses: Losses, model: str, world: int) -> None:
    """Losses are as near as those of another backend in bf16, or as the rounding of bf16."""
    found = {kernels: losses(world, kernels, model) for kernels in ("reference", "torch", "cudnn")}
    exact = found["reference"]
    assert exact[0] - exact[-1] > 0.05
    between = (found["torch"] - exact).abs().max()
    assert (found["cudnn"] - exact).abs().max() <= max(2 * between, 2**-9 * exact.max())


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("tiny", "nvfp4"),
        *slow(("tiny", "mxfp8"), ("tiny_gpt_oss", "mxfp8"), ("tiny_gpt_oss", "nvfp4")),
    ],
)
def test_losses_of_a_recipe_are_those_of_its_emulation(
    losses: Losses, model: str, form: str
) -> None:
    """No further from them than the recipe itself is from bf16."""
    exact = losses(1, "reference", model, form)
    away = (losses(1, "reference", model) - exact).abs().max()
    assert exact[0] - exact[-1] > 0.05
    assert (
        0 < (losses(1, "cudnn", model, form) - exact).abs().max() <= max(away, 2**-9 * exact.max())
    )


@contextmanager
def saved_with_cudnn(rank: int) -> Iterator[None]:
    with experts_on_cpu(rank), saved_before_step_3(rank):
        yield


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "optimizer", "ranks"), [("tiny_gpt_oss", "muon", 1), *slow(("tiny", "adamw", 2))]
)
def test_checkpoints_are_canonical(tmp_path: Path, model: str, optimizer: str, ranks: int) -> None:
    """cudnn saves torch's checkpoint bit for bit, weights, masters and moments; torch continues
    from that; and each has the same next loss."""
    before, first, losses = "never", None, []
    for i, (kernels, world) in enumerate((("torch", 1), ("auto", ranks), ("torch", 1))):
        folder = tmp_path / str(i)
        command = [*SMALL, *SIZES, *MODELS[model], f"kernels={kernels}", f"optim={optimizer}"]
        command += ["precision=bf16", "run.steps=3", f"run.resume={before}", f"run.dir={folder}"]
        change = saved_with_cudnn if kernels == "auto" else saved_before_step_3
        main, *_ = run(world, command, change)
        assert main.code == 0, main.err
        assert re.search(r"grouped_mlp +cudnn\b", main.out) or kernels == "torch"
        saved = folder / "run/checkpoints/step_00000002"
        losses.append(records(folder / "run")[-1]["loss"])
        first = first or stored(saved)
        assert_equal(first, stored(saved))
        before = str(saved)
    assert len(first or {}) > 20 and any("optimizer" in name for name in first or {})
    assert losses == pytest.approx([losses[0]] * len(losses), rel=2e-3)


@pytest.mark.dist
def test_initial_weights_are_those_of_other_kernels(tmp_path: Path) -> None:
    found = []
    for kernels, change in (("torch", None), ("auto", experts_on_cpu)):
        folder = tmp_path / kernels
        command = [*SMALL, *SIZES, *MODELS["tiny"], f"kernels={kernels}", f"run.dir={folder}"]
        command += [
            "precision=bf16",
            "run.steps=1",
            "optim.lr=1e-20",
            "optim.min_lr=0",
            "run.save_interval=1",
        ]
        (main,) = run(1, command, change)
        assert main.code == 0, main.err
        found.append(stored(folder / "run/checkpoints/step_00000001"))
    weights = [
        {k: v for k, v in saved.items() if "optimizer" not in k and ".experts." in k}
        for saved in found
    ]
    assert weights[0]
    assert_equal(*weights)
