"""Parameters, FLOPs and rules of the variants."""

from pathlib import Path

import pytest

from phalanx.configs.arithmetic.accounting import (
    active_parameters,
    flops_per_token,
    layer_flops,
    parameters,
)
from phalanx.configs.load import load
from phalanx.configs.schema import ModelConfig
from tests.configs import test_validate
from tests.support.distributed import run_distributed

PROBLEMS = test_validate.table(Path(__file__).with_name("problems.md"))
MODEL = [
    "model=tiny",
    "model.vocab_size=256",
    "model.moe.dense_layers=1",
    "model.moe.shared_ffn=64",
]


def model(variants: str, *more: str) -> ModelConfig:
    return load([*MODEL, *more, f"model.variants={variants}"]).model


def _built(overrides: list[str]) -> int:
    from tests.moe.model.test_features import built
    from tests.moe.on_meta import OnMeta

    with OnMeta():
        _, gpt = built(overrides)
    return sum(p.numel() for p in gpt.parameters())


@pytest.mark.dist
def test_parameters_are_those_of_the_model() -> None:
    overrides = [*MODEL, "model.mtp_layers=0", "model.variants=[latent:32]"]
    (count,) = run_distributed(_built, 1, overrides)
    assert parameters(load(overrides).model).total == count


def test_latent_experts_move_and_multiply_latent_channels() -> None:
    plain, latent = model("[]"), model("[latent:32]")
    h, e, sparse = plain.hidden, plain.moe, plain.layers - 1
    experts = 3 * e.ffn * (h - 32)
    projections = 2 * h * 32
    before, after = (parameters(m) for m in (plain, latent))
    assert before.total - after.total == sparse * (e.experts * experts - projections)
    before, after = (active_parameters(m) for m in (plain, latent))
    assert before.total - after.total == sparse * (e.top_k * experts - projections)
    fewer = 6.0 * sparse * (e.top_k * experts - projections)
    assert flops_per_token(plain, 64) - flops_per_token(latent, 64) == fewer
    dense, *layers = (
        a - b for a, b in zip(layer_flops(plain, 64), layer_flops(latent, 64), strict=True)
    )
    assert dense == 0 and layers == [fewer / sparse] * sparse


def test_estimates_follow() -> None:
    from phalanx.moe.plan.cost.stages import exchange_bytes
    from phalanx.moe.plan.cost.traffic import row_bytes
    from phalanx.moe.plan.cost.weights import stage_weights

    half = load(["model=moonlight_16b_a3b", "model.variants=[latent:1024]"])
    whole = load(["model=moonlight_16b_a3b"])
    for cfg in (half, whole):
        cfg.parallel.dispatch, cfg.kernels.backend = "symm", "fused"
    assert row_bytes(half) * 2 == row_bytes(whole)
    assert exchange_bytes(half, 8) < exchange_bytes(whole, 8)
    (weights,) = stage_weights(half, 1)
    assert weights.dense + weights.expert == parameters(half.model).total
    muon = load(["model=tiny", "model.variants=[latent:64]", "optim=muon"])
    (weights,) = stage_weights(muon, 1)
    assert weights.dense + weights.expert == parameters(muon.model).total
    e, h, layers = muon.model.moe, muon.model.hidden, muon.model.layers
    assert weights.whole.expert == layers * e.experts * 3 * e.ffn * 64
    attention = parameters(muon.model).attention
    shared = layers * 3 * h * e.shared_ffn
    assert weights.whole.dense == attention + shared + layers * 2 * h * 64


@pytest.mark.parametrize(("overrides", "world", "problem", "fix"), PROBLEMS)
def test_problem_names_the_override_that_fixes_it(
    overrides: str, world: int, problem: str, fix: str
) -> None:
    test_validate.test_problem_names_the_override_that_fixes_it(overrides, world, problem, fix)


def test_hugging_face_has_no_such_models() -> None:
    from phalanx.moe.hf.config import to_json
    from phalanx.moe.hf.reading import ConversionError

    m = load(["model=mixtral_8x7b", "model.variants=[latent:1024]"]).model
    with pytest.raises(ConversionError, match="model.variants=.* cannot be exported"):
        to_json(m, 4096, "bfloat16")
