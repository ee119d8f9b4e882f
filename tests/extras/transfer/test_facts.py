"""Rules of configurations and factors by kind of parameter."""

from pathlib import Path

import pytest

from phalanx.configs.arithmetic.accounting import flops_per_token, parameters
from phalanx.configs.load import load
from phalanx.extras.transfer.scales import (
    EXPERT_FC1,
    EXPERT_FC2,
    FINAL_NORM,
    HIDDEN,
    ROUTER,
    SHARED_FC2,
    TABLE,
    VECTOR,
    Scale,
    kind_of,
    scales,
)
from tests.configs import test_validate

PROBLEMS = test_validate.table(Path(__file__).with_name("problems.md"))
WIDE = ["model=tiny", "model.hidden=512", "model.moe.ffn=1024"]


@pytest.mark.parametrize(("overrides", "world", "problem", "fix"), PROBLEMS)
def test_problem_names_the_override_that_fixes_it(
    overrides: str, world: int, problem: str, fix: str
) -> None:
    test_validate.test_problem_names_the_override_that_fixes_it(overrides, world, problem, fix)


def test_adamw_has_the_factors_of_the_paper() -> None:
    """Table 8 of arXiv 2203.03466, with the factor of the output in the last norm."""
    found = scales(load([*WIDE, "model.variants=[mup:128]"]))
    for kind in (HIDDEN, EXPERT_FC1, EXPERT_FC2, SHARED_FC2):
        assert found[kind] == Scale(initial=0.5, rate=0.25, decay=4, eps=0.25)
    assert found[TABLE] == found[VECTOR] == Scale(eps=0.25)
    assert found[ROUTER] == Scale(initial=0.25, rate=0.25, decay=4)
    assert (found[FINAL_NORM].initial, found[FINAL_NORM].rate) == (0.25, 0.25)


def test_experts_of_the_base_may_have_their_own_width() -> None:
    found = scales(load([*WIDE, "model.variants=[mup:128,mup_ffn:1024]"]))
    assert found[EXPERT_FC1].rate == 0.25 and found[EXPERT_FC1].initial == 0.5
    assert found[EXPERT_FC2].rate == found[EXPERT_FC2].initial == 1
    assert found[SHARED_FC2].rate == 1 and found[HIDDEN].rate == 0.25


def test_muon_keeps_the_spectral_norm_of_an_update_over_that_of_the_base() -> None:
    """Moonlight's update has the norm 0.2 sqrt(max(rows, columns)); sqrt(rows / columns) is due."""
    muon = [*WIDE, "optim=muon"]
    found = scales(load([*muon, "model.variants=[mup:128]"]))
    assert found[HIDDEN].rate == found[EXPERT_FC2].rate == 0.5 and found[ROUTER].rate == 0.25
    found = scales(load([*muon, "model.variants=[mup:128,mup_ffn:256]", "model.moe.ffn=256"]))
    for kind, base, here in (
        (EXPERT_FC1, (256, 128), (256, 512)),
        (EXPERT_FC2, (128, 256), (512, 256)),
    ):
        before, now = (
            (rows / columns / max(rows, columns)) ** 0.5 for rows, columns in (base, here)
        )
        assert found[kind].rate == pytest.approx(now / before)
        assert found[kind].rate * found[kind].decay == pytest.approx(1)


def test_at_the_width_of_the_base_nothing_changes() -> None:
    for optim in ("adamw", "muon"):
        found = scales(load(["model=tiny", f"optim={optim}", "model.variants=[mup:128]"]))
        assert set(found.values()) == {Scale()}


def test_names_of_all_backends_have_a_kind() -> None:
    for name, dims, kind in (
        ("module.module.embedding.word_embeddings.weight", 2, TABLE),
        ("output_layer.weight", 2, TABLE),
        ("decoder.layers.0.self_attention.linear_qkv.weight", 2, HIDDEN),
        ("decoder.layers.0.self_attention.linear_qkv.bias", 1, VECTOR),
        ("decoder.layers.0.self_attention.q_layernorm.weight", 1, VECTOR),
        ("decoder.layers.0.mlp.linear_fc2.weight", 2, HIDDEN),
        ("decoder.layers.0.mlp.router.weight", 2, ROUTER),
        ("decoder.layers.0.mlp.shared_experts.gate_weight", 2, ROUTER),
        ("decoder.layers.0.mlp.shared_experts.linear_fc2.weight", 2, SHARED_FC2),
        ("decoder.layers.0.mlp.experts.w1", 3, EXPERT_FC1),
        ("decoder.layers.0.mlp.experts.b1", 2, VECTOR),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight", 2, EXPERT_FC2),
        ("mtp.layers.0.eh_proj.weight", 2, HIDDEN),
        ("mtp.layers.0.final_layernorm.weight", 1, FINAL_NORM),
        ("decoder.final_layernorm.weight", 1, FINAL_NORM),
    ):
        assert kind_of(name, dims) == kind, name
    with pytest.raises(ValueError, match="vision.proj.weight: model.variants=mup has no rule"):
        kind_of("vision.proj.weight", 2)


def test_the_model_itself_stays() -> None:
    plain, mup = (load([*WIDE, f"model.variants={v}"]).model for v in ("[]", "[mup:128]"))
    assert parameters(plain) == parameters(mup)
    assert flops_per_token(plain, 64) == flops_per_token(mup, 64)


def test_it_can_be_exported() -> None:
    from phalanx.moe.hf.config import to_json

    plain, mup = (
        load(["model=mixtral_8x7b", f"model.variants={v}"]).model for v in ("[]", "[mup:256]")
    )
    assert to_json(plain, 4096, "bfloat16") == to_json(mup, 4096, "bfloat16")
