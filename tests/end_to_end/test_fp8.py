"""Training with `precision=fp8_block`: layers, learning, several ranks, resuming."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from tests.support.runs import SMALL, exact, records, run

pytestmark = pytest.mark.dist

FP8 = [*SMALL, "precision=fp8_block"]


@contextmanager
def products(
    _: int, *, backend: str = "phalanx.kernels.expert_mlp.fp8:EmulatedFP8"
) -> Iterator[dict[str, int]]:
    """Calls of a quantized recipe in the forward passes of a run, by operand."""
    from phalanx.kernels.expert_mlp import dense_mlp

    calls = {"linear": 0, "fc1": 0}
    linear, emulated = dense_mlp._Linear.forward, resolve_name(backend)
    fc1 = emulated.fc1_act

    def of_linear(*given: Any) -> Any:
        calls["linear"] += 1
        return linear(*given)

    def counted(fc1: Any) -> Any:
        def of_fc1(*given: Any, **how: Any) -> Any:
            calls["fc1"] += 1
            return fc1(*given, **how)

        return of_fc1

    dense_mlp._Linear.forward = staticmethod(of_linear)
    emulated.fc1_act = counted(fc1)
    try:
        yield calls
    finally:
        dense_mlp._Linear.forward = staticmethod(linear)
        emulated.fc1_act = fc1


@pytest.mark.parametrize(
    ("overrides", "linear", "fc1"),
    [
        # Two layers: mixed projection and output; routed experts.
        (["model=tiny"], 4, 2),
        (["model=tiny", "precision.dense=bf16"], 0, 2),
        (["model=tiny", "precision.bf16_first_layers=1"], 2, 1),
        # Three layers, the last of multi-token prediction. Latent attention: queries and keys with
        # values down and up, output. A dense layer, and two of routed and shared experts.
        (["model=tiny_deepseek", "model.moe.shared_ffn=16"], 15, 5),
        (["model=tiny_deepseek", "model.moe.shared_ffn=16", "precision.dense=bf16"], 0, 2),
        (["model=tiny_gpt_oss"], 4, 2),
    ],
)
def test_layers_in_fp8(overrides: list[str], linear: int, fc1: int, tmp_path: Path) -> None:
    given = [*overrides, f"run.dir={tmp_path}", "run.steps=1", "data.global_batch=4"]
    (main,) = run(1, [*FP8, *given], products)
    assert main.code == 0, main.err
    assert main.seen == {"linear": linear, "fc1": fc1}


def test_it_learns_as_in_bf16(tmp_path: Path) -> None:
    losses = {}
    for recipe in ("bf16", "fp8_block"):
        given = [f"precision={recipe}", f"run.dir={tmp_path / recipe}", "run.steps=12"]
        (main,) = run(1, [*SMALL, *given])
        assert main.code == 0, main.err
        losses[recipe] = [r["loss"] for r in records(tmp_path / recipe / "run")]
    bf16, fp8 = losses["bf16"], losses["fp8_block"]
    assert fp8 != bf16
    assert fp8[-1] < 0.9 * fp8[0]
    assert max(abs(a - b) / b for a, b in zip(fp8, bf16, strict=True)) < 0.02


@pytest.mark.parametrize("model", [pytest.param("tiny", marks=pytest.mark.slow), "tiny_deepseek"])
def test_tensor_parallel_ranks_learn_what_one_learns(model: str, tmp_path: Path) -> None:
    """Attention, dense and shared MLPs; a rank's part of a block has a scale of its own."""
    losses = []
    given = [*FP8, f"model={model}", "run.steps=3"]
    given += ["model.moe.shared_ffn=32"] if model == "tiny_deepseek" else []
    for tensor in (1, 2):
        at = [f"run.dir={tmp_path / str(tensor)}", f"parallel.tensor={tensor}"]
        main, *_ = run(tensor, [*given, *at], products)
        assert main.code == 0, main.err
        assert main.seen is not None and main.seen["linear"] > 3 * (6 if "deep" in model else 3)
        losses.append([r["loss"] for r in records(tmp_path / str(tensor) / "run")])
    assert losses[0] != losses[1] and losses[0][-1] < losses[0][0]
    assert max(abs(a - b) / b for a, b in zip(*losses, strict=True)) < 5e-3


def test_the_same_on_two_ranks_whatever_travels_and_again(tmp_path: Path) -> None:
    """Neither FP8 rows in exchanges nor resuming changes a bit."""
    command = [*FP8, "parallel.expert=2", "parallel.dispatch=alltoall"]
    for name, steps in (("bf16", 2), ("fp8", 1), ("fp8", 2)):
        given = [f"run.dir={tmp_path / name}", f"precision.dispatch={name}", f"run.steps={steps}"]
        main, _ = run(2, [*command, *given])
        assert main.code == 0, main.err
    bf16, resumed = (exact(records(tmp_path / name / "run")) for name in ("bf16", "fp8"))
    assert len(bf16) == 2 and resumed == bf16
