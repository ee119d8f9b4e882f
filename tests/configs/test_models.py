"""Model files: what no published config.json says, and small models that have every part of large.

tests/moe/hf/test_config.py compares the files with the config.json files.
"""

from dataclasses import replace

import pytest

from phalanx.configs.load import load


def test_deepseek_v3_with_four_layers() -> None:
    small, large = (load([f"model={name}"]).model for name in ("deepseek_v3_l4", "deepseek_v3"))
    moe = replace(large.moe, dense_layers=1)
    assert small == replace(large, name="deepseek_v3_l4", layers=4, mtp_layers=0, moe=moe)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_l4", "moonlight_16b_a3b"])
def test_deepseek_balancing(name: str) -> None:
    r = load([f"model={name}"]).model.moe.router
    assert r.bias_rate == 1e-3
    assert (r.aux_loss, r.global_aux_loss, r.z_loss) == (0, 0, 0)
    assert r.seq_aux_loss == (1e-3 if name == "moonlight_16b_a3b" else 1e-4)


def test_tiny_deepseek_has_every_part_of_deepseek_v3() -> None:
    small, large = (load([f"model={name}"]).model for name in ("tiny_deepseek", "deepseek_v3"))
    for m in (small, large):
        a, e, r = m.attention, m.moe, m.moe.router
        assert (a.kind, r.score, r.normalize) == ("mla", "sigmoid", True)
        assert min(a.q_lora_rank, m.mtp_layers, e.shared_ffn, e.dense_layers) > 0
        assert min(a.yarn.factor, r.groups, r.scale) > 1
        assert r.bias_rate and r.seq_aux_loss and r.group_topk < r.groups


def test_tiny_gpt_oss_has_every_part_of_gpt_oss() -> None:
    small, large = (load([f"model={name}"]).model for name in ("tiny_gpt_oss", "gpt_oss_20b"))
    for m in (small, large):
        a, e = m.attention, m.moe
        assert (a.kind, a.sinks, a.window_every, a.yarn.truncate) == ("gqa", True, 2, False)
        assert a.window and a.kv_heads < a.heads and a.yarn.factor > 1 and m.bias
        assert (e.activation, e.activation_limit, e.activation_offset) == ("quick_geglu", 7.0, 1.0)
        assert e.router.softmax_over == "topk"


def test_tiny_qwen3_next_has_every_part_of_qwen3_next() -> None:
    small, large = (
        load([f"model={name}"]).model for name in ("tiny_qwen3_next", "qwen3_next_80b_a3b")
    )
    for m in (small, large):
        a, e, state = m.attention, m.moe, m.linear_attention
        assert (a.kind, a.output_gate, a.qk_norm, m.norm_zero_centered) == ("gqa", True, True, True)
        assert 0 < a.rotary_dim < a.head_dim and a.kv_heads < a.heads
        assert e.shared_gate and e.shared_ffn and m.mtp_layers
        assert state.full_attention_interval == 4 and state.key_heads < state.value_heads
        assert m.layers % 4 == 0
