"""bench_libraries without a GPU: every part against libraries that are stand-ins or absent."""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from phalanx.kernels.core_attention import core
from phalanx.kernels.core_attention.latent import keys_values
from phalanx.kernels.core_attention.qkv import queries_keys_values
from phalanx.kernels.core_attention.rope import rope
from phalanx.moe.router import fused_topk
from phalanx.moe.router.scores import choose, probabilities
from phalanx.scripts import bench_libraries
from phalanx.scripts.bench import attention, libraries, loss, quantize
from phalanx.scripts.bench.comparison import Row, gap
from phalanx.scripts.bench.libraries import Sizes
from phalanx.scripts.bench.measure import Bench
from tests.scripts.stopwatch import Stopwatch

SMALL = Sizes(positions=16, batches=(1, 2), parameters=1 << 12, tensors=4)


def topk(logits, bias, options, top_k):
    """`moe.router.fused_topk.topk` in torch."""
    score = logits.detach()
    if bias is not None or options.group_topk < options.groups:
        score = score.sigmoid() + (0 if bias is None else bias)
    idx = choose(score, top_k, options.groups, options.group_topk)
    return idx.int(), probabilities(logits, idx, options)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(fused_topk, "topk", topk)
    monkeypatch.setattr(libraries, "MLA_HEADS", {"Moonlight": 2})


def module(monkeypatch, name: str, **members: Any) -> None:
    made = ModuleType(name)
    for key, value in members.items():
        setattr(made, key, value)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def stand_ins(monkeypatch):
    """Libraries of these names and signatures, on our own operations; one is wrong."""

    def q(t, cos, sin, own, rotary):
        freqs = libraries.angles(t.shape[0], rotary, t.device)
        return rope(t, freqs, interleaved=True, first=own) * 1.5

    def kv(kv, part, cos, sin, rotary, own, value):
        freqs = libraries.angles(kv.shape[0], rotary, kv.device)
        return keys_values(kv, part[:, :, 0], freqs, nope=own)

    def router(logits, topk, num_groups, group_topk, expert_bias, topk_indices=None, **how):
        options = libraries.RouterConfig(
            score=how["score_function"],
            scale=how["scaling_factor"],
            groups=num_groups or 1,
            group_topk=group_topk or 1,
        )
        idx, prob = fused_topk.topk(logits, expert_bias, options, topk)
        assert topk_indices is None or topk_indices.shape == idx.shape
        return torch.zeros_like(logits).scatter(1, idx.long(), prob), idx

    def qkv(qkv, q_freqs, k_freqs, parts):
        heads, d = parts[0] // parts[1], parts[1]
        return queries_keys_values(qkv.unflatten(-1, (heads + 2, d)), None, q_freqs)

    def turn(x, freqs, tensor_format, fused):
        assert tensor_format == "sbhd" and fused
        return rope(x, freqs)

    class RMSNorm(torch.nn.RMSNorm):
        def __init__(self, size, eps, dtype, device):
            super().__init__(size, eps=eps, dtype=dtype, device=device)

    class FusedAdam(libraries.AdamW):
        def __init__(self, params, exp_avg_dtype=torch.float32, exp_avg_sq_dtype=None, **given):
            given = {k: v for k, v in given.items() if not k.startswith(("master", "store"))}
            super().__init__(params, moments=exp_avg_dtype, **given)

    te = "transformer_engine"
    for name in (te, f"{te}.pytorch"):
        module(monkeypatch, name)
    sys.modules[f"{te}.pytorch"].RMSNorm = RMSNorm
    module(monkeypatch, f"{te}.pytorch.router", fused_topk_with_score_function=router)
    rope_module = ModuleType("rope")
    rope_module.apply_fused_qkv_rotary_pos_emb = qkv
    rope_module.apply_rotary_pos_emb = turn
    module(monkeypatch, f"{te}.pytorch.attention", rope=rope_module)
    module(monkeypatch, f"{te}.pytorch.optimizers", FusedAdam=FusedAdam)
    fused = ModuleType("fused")
    fused.fused_apply_mla_rope_for_q, fused.fused_apply_mla_rope_for_kv = q, kv
    name = "megatron.core.fusions"
    module(monkeypatch, name, fused_mla_yarn_rope_apply=fused)


def rows(capsys) -> list[Row]:
    made = bench_libraries.run(Bench(Stopwatch(), 2), list(libraries.PARTS), SMALL)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == len(made) + 2
    assert {line.count("|") for line in lines} == {10}
    return made


def test_both_sides_are_measured_and_compared(stand_ins, capsys):
    made = rows(capsys)
    assert len(made) == 3 * 2 * 2 * 2 + 2 * 2 * 2 + 2 * 2 + 3 + 2 * 2 * 2
    for row in made:
        assert row.note == "" and row.ours and row.theirs is not None and row.gap.largest > 0
        if row.operation.startswith("MLA queries"):
            assert row.gap.difference == pytest.approx(row.gap.largest / 2, rel=0.02)
        else:
            assert row.gap.difference <= 1e-6, row


def test_a_library_that_is_not_there_loses_only_its_side(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "megatron.core.fusions", None)
    made = rows(capsys)
    assert made
    for row in made:
        assert row.ours and row.theirs is None and row.gap is None
        assert "ModuleNotFoundError" in row.note or "ImportError" in row.note


def stated(backend: str):
    def call(q, k, v, s=None, *, scale, window=0):
        heads = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        how = dict(scale=scale, window=window, sinks_H=s, backend=backend)
        return core.attention(*heads, **how).permute(2, 0, 1, 3)

    return call


class DotProductAttention:
    def __init__(self, heads, channels, *, softmax_scale, num_gqa_groups, **how):
        self.groups, self.scale = num_gqa_groups, softmax_scale
        assert how == dict(attention_dropout=0.0, attn_mask_type="causal", qkv_format="sbhd")

    def __call__(self, q, k, v):
        assert k.shape[2] == self.groups
        return stated("reference")(q, k, v, scale=self.scale).flatten(2)


@pytest.mark.parametrize("there", [True, False])
def test_attention_beside_the_other_backends(there, monkeypatch, capsys):
    small = {
        "grouped": attention.Layer(2, 4, 2, 16, 16),
        "sinks": attention.Layer(1, 4, 2, 16, 16, window=3, sinks=True),
        "latent": attention.Layer(1, 2, 2, 24, 16),
    }
    monkeypatch.setattr(attention, "LAYERS", small)
    for name in ("fa4", "flex"):
        monkeypatch.setitem(core._BACKENDS, name, core._BACKENDS["reference"])
    monkeypatch.setattr(attention.sinks, "attention", stated("reference"))
    te = "transformer_engine"
    module(monkeypatch, te)
    module(monkeypatch, f"{te}.pytorch", DotProductAttention=DotProductAttention)
    if not there:
        monkeypatch.setitem(sys.modules, f"{te}.pytorch", None)
    made = bench_libraries.run(Bench(Stopwatch(), 2), ["attention"], SMALL)
    assert len(made) == 3 * (3 + 2 + 3)
    assert {row.pass_name for row in made} == {"forward", "backward", "host"}
    for row in made:
        skipped = not there and row.library == "TE" and "sinks" not in row.operation
        assert row.ours and (row.theirs is None) == skipped == ("Error" in row.note)
        if row.gap is not None:
            assert row.gap.difference <= 0.02 * row.gap.largest
    assert len(capsys.readouterr().out.splitlines()) == len(made) + 3


@pytest.mark.parametrize("there", [True, False])
def test_the_loss_beside_two_passes(there, monkeypatch, capsys):
    def stated(logits, target, factor=1.0):
        x = logits.float().requires_grad_()
        found = torch.nn.functional.cross_entropy(x, target, reduction="none")
        logits.copy_(torch.autograd.grad(found.sum(), x)[0] * factor)
        return found.detach()

    def quack(logits, target, return_dx, inplace_backward):
        assert return_dx and inplace_backward
        return stated(logits, target, 1.5), logits

    monkeypatch.setattr(loss, "VOCABULARIES", {"small": 40, "large": 72})
    monkeypatch.setattr(loss, "_in_two_passes", stated)
    monkeypatch.setattr(loss.one_pass, "cross_entropy_", lambda x, t, scale: stated(x, t))
    module(monkeypatch, "quack.cross_entropy", cross_entropy_fwd=quack)
    if not there:
        monkeypatch.setitem(sys.modules, "quack.cross_entropy", None)
    made = bench_libraries.run(Bench(Stopwatch(), 2), ["loss"], SMALL)
    assert [row.library for row in made] == ["QuACK", "two passes"] * 2
    for row in made:
        skipped = not there and row.library == "QuACK"
        assert row.ours and (row.theirs is None) == skipped == ("Error" in row.note)
        if not skipped:
            wrong = row.library == "QuACK"
            assert (row.gap.difference > 0.1) == wrong and row.gap.largest > 1


def test_quantizing_beside_a_copy(monkeypatch, capsys):
    monkeypatch.setattr(quantize, "ROWS", {"small": (300, 160, 3)})
    monkeypatch.setattr(quantize, "WEIGHTS", {"small": (2, 130, 64)})
    made = bench_libraries.run(Bench(Stopwatch(), 2), ["quantize"], SMALL)
    assert len(made) == len({row.operation for row in made}) == 2 + 2 * 2 + 1
    assert all(row.ours and row.theirs and row.library == "copy" for row in made)
    ours, copied = (float(rate) for rate in made[0].note.removesuffix(" TB/s").split(", "))
    moved = 300 * 160 * 3 + 300 * 2 * 4  # two bytes in, one out, and scales of two blocks
    assert ours == pytest.approx(moved / made[0].ours * 1e-9, rel=0.01)
    assert copied == pytest.approx(moved / made[0].theirs * 1e-9, rel=0.01)


def test_a_part_that_fails_is_a_row(monkeypatch, capsys):
    def broken(bench, sizes):
        raise RuntimeError("no room | at all")
        yield

    monkeypatch.setitem(bench_libraries.PARTS, "rope", broken)
    made = bench_libraries.run(Bench(Stopwatch(), 2), ["rope"], SMALL)
    assert [row.note for row in made] == ["RuntimeError: no room | at all"]
    assert "no room / at all |" in capsys.readouterr().out


def test_a_nan_is_not_hidden():
    same = torch.ones(3)
    strange = torch.tensor([1.0, float("nan"), 1.0])
    assert gap([same, same], [same, same]) == (0.0, 1.0)
    assert gap([same, same], [same, 3 * same]).difference == 2
    assert math.isnan(gap([same, same], [strange, same]).difference)
    with pytest.raises(ValueError):
        gap([same], [same, same])
    broken = Row("rope", "te", "forward", 1.0, 2.0, gap([strange], [same]), "slow")
    assert broken.failed and "| FAILED: a result is NaN or infinite; slow |" in broken.markdown()
    assert not Row("rope", "te", "forward", 1.0, 2.0, gap([same], [same])).failed


def test_arguments(capsys, monkeypatch):
    for argv in (["ropes"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            bench_libraries.main(argv)
    assert "a part is one of router, rope, heads, adam, mla" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_libraries.main(["rope"]) == 1
