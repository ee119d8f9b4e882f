"""Training with `precision=mxfp8` and `nvfp4`: layers, learning, resuming."""

import functools
import tempfile
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.test_fp8 import products
from tests.support.runs import SMALL, exact, records, run

BACKEND = "phalanx.extras.microscaling.emulated:EmulatedMicroscaling"

pytestmark = pytest.mark.dist

LAYERS = [
    # As in test_fp8; routed, shared and dense experts are by the recipe's own backend.
    (["model=tiny"], 4, 2),
    (["model=tiny", "precision.dense=bf16"], 0, 2),
    (["model=tiny", "precision.bf16_last_layers=1"], 2, 1),
    (["model=tiny_deepseek", "model.moe.shared_ffn=16"], 15, 5),
    (["model=tiny_gpt_oss"], 4, 2),
]
BY_TURNS = [
    pytest.param(recipe, *case, marks=[] if n % 2 == i else pytest.mark.slow)
    for i, recipe in enumerate(("mxfp8", "nvfp4"))
    for n, case in enumerate(LAYERS)
]
"""Each case with one recipe; with the other it is slow."""


@pytest.mark.parametrize(("recipe", "overrides", "linear", "fc1"), BY_TURNS)
def test_layers(recipe: str, overrides: list[str], linear: int, fc1: int, tmp_path: Path) -> None:
    given = [*overrides, f"run.dir={tmp_path}", "run.steps=1", "data.global_batch=4"]
    (main,) = run(1, [*SMALL, f"precision={recipe}", *given], partial(products, backend=BACKEND))
    assert main.code == 0, main.err
    assert main.seen == {"linear": linear, "fc1": fc1}
    output = " ".join(main.out.split())
    assert f"{recipe} emulated reference multiplies its values in bf16" in output


def losses(recipe: str, folder: Path) -> list[float]:
    (main,) = run(1, [*SMALL, f"precision={recipe}", f"run.dir={folder}", "run.steps=12"])
    assert main.code == 0, main.err
    return [r["loss"] for r in records(folder / "run")]


@functools.cache
def losses_in_bf16() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return losses("bf16", Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "separate"), [("mxfp8", 0.02), ("nvfp4", 0.06)])
def test_it_learns_as_in_bf16(recipe: str, separate: float, tmp_path: Path) -> None:
    bf16, narrow = losses_in_bf16(), losses(recipe, tmp_path)
    assert narrow != bf16
    assert narrow[-1] < 0.9 * narrow[0]
    assert max(abs(a - b) / b for a, b in zip(narrow, bf16, strict=True)) < separate


@pytest.mark.parametrize("recipe", [pytest.param("mxfp8", marks=pytest.mark.slow), "nvfp4"])
def test_the_same_on_two_ranks_and_again(recipe: str, tmp_path: Path) -> None:
    """Neither resuming nor recomputation changes a bit, with stochastic rounding or without."""
    given = [*SMALL, f"precision={recipe}", "parallel.expert=2", "parallel.dispatch=alltoall"]
    again = "run.recompute=[expert_h,norm]"
    for name, steps, more in (("whole", 2, []), ("again", 1, [again]), ("again", 2, [again])):
        main, _ = run(2, [*given, *more, f"run.dir={tmp_path / name}", f"run.steps={steps}"])
        assert main.code == 0, main.err
    whole, resumed = (exact(records(tmp_path / name / "run")) for name in ("whole", "again"))
    assert len(whole) == 2 and resumed == whole


def test_a_run_goes_on_with_another_recipe(tmp_path: Path) -> None:
    given = [*SMALL, f"run.dir={tmp_path}"]
    for recipe, steps in (("bf16", 2), ("nvfp4", 4), ("fp8_block", 6)):
        (main,) = run(1, [*given, f"precision={recipe}", f"run.steps={steps}"])
        assert main.code == 0, main.err
    assert "precision.recipe nvfp4 -> fp8_block" in main.err
