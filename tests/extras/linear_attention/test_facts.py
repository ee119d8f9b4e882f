"""Counts of Qwen3-Next, and FLOPs and saved tensors of linear attention, written out."""

import pytest

from phalanx.configs.arithmetic.accounting import flops_per_token, parameters
from phalanx.configs.load import load
from phalanx.configs.validate import validate
from phalanx.moe.plan.cost.activations import Activations
from phalanx.moe.plan.described import resolved
from tests.configs import test_stages
from tests.moe import test_compiled_shapes as shapes
from tests.moe.plan import test_accounting as accounting


def test_linear_attention_costs_the_same_at_every_length() -> None:
    """Its convolution, and four products of a state of 128 x 128 for each value head."""
    every = "model.linear_attention.full_attention_interval"
    base = ["model=tiny_qwen3_next", "model.mtp_layers=0"]
    some, more = (load([*base, f"{every}={n}"]).model for n in (2, 4))  # one layer more
    a, h = some.linear_attention, some.hidden
    keys, values = 128 * a.key_heads, 128 * a.value_heads
    state = h * (2 * keys + 2 * values + 2 * a.value_heads) + h * values
    state += 4 * (2 * keys + values) + 4 * a.value_heads * 128**2
    heads = some.attention.heads * some.attention.head_dim
    full = h * (2 * heads + 2 * some.attention.kv_heads * some.attention.head_dim) + heads * h
    for length in (0, 64, 4096):
        core = 2 * heads * length / 2
        found = flops_per_token(more, length) - flops_per_token(some, length)
        assert found == pytest.approx(6 * (state - full - core))


def test_what_a_layer_of_linear_attention_keeps() -> None:
    """Written out once for a layer of Qwen3-Next, in bf16 elements and fp32 numbers of a token."""
    words = "run=bench data=synthetic data.sequence_length=4096 data.micro_batch=1"
    given = [*words.split(), "data.global_batch=2", "model.moe.router.force_balance=true"]
    cfg = load([*given, "model=qwen3_next_80b_a3b", "kernels=fused"])
    validate(cfg, 1)
    cfg = resolved(cfg, 1, 8)
    act, values, keys = Activations(cfg, 1), 32 * 128, 2 * 16 * 128
    linear, full = (act.moe_layer(mixer=name) for name in ("linear_attention", "attention"))
    state = 2 * (
        (keys + values + values + 2 * 32)  # the projection
        + values  # its gates, copied
        + keys
        + values  # queries and keys normalised, values
        + 32 * 64  # solved systems
        + 2 * values  # output before and after the norm
    )
    state += 4 * 6 * 32
    heads, shared = 16 * 256, 2 * 256
    # Queries, keys, values, output and its gate; what the norms keep and values are part of.
    attention = 2 * (4 * heads + 2 * shared + 2 * (heads + shared)) + 4 * 16
    assert linear.saved - full.saved == 4096 * (state - attention)
    assert linear.backward >= 4096 * 2 * (2 * 32 * 128 * 128 // 64)
    # Of two context ranks each has half of the heads at all tokens, rather than the reverse.
    cfg.parallel.context = 2
    act = Activations(cfg, 2)
    linear, full = (act.moe_layer(mixer=name) for name in ("linear_attention", "attention"))
    attention += 2 * (heads + 2 * shared)  # keeps queries, keys and values after their exchange too
    assert linear.saved - full.saved == 2048 * (state - attention)


NEXT = "qwen3_next_80b_a3b"


def test_published_numbers() -> None:
    """Model card: 80 B, 3 B of them active, 79 B without embeddings."""
    accounting.test_published_parameters(NEXT, 79.67, 3.56, 2)
    accounting.test_published_active_parameters(NEXT, 3, False, False)
    accounting.test_flops_per_token_at_4096(NEXT, 25.13)
    # Its safetensors repeat neither embedding nor head for the prediction layer.
    assert parameters(accounting.model(NEXT)).total == 81_324_862_720
    test_stages.test_layers_and_output_layer_make_up_the_flops_of_a_token(NEXT)


def test_shapes_of_compiled_kernels() -> None:
    """Layers of linear attention have none of core attention, nor its norms."""
    hidden = shapes.hidden_rows(2048, fp32_weight=True)
    model, alone = f"model={NEXT}", ("model.layers=3", "model.mtp_layers=0")
    assert shapes.layers(model) == {shapes.AttentionLayer(8, 256, 256)}
    assert shapes.rows(model) == hidden | shapes.inner_rows(256, fp32_weight=True)
    assert shapes.layers(model, *alone) == set()
    assert shapes.rows(model, *alone) == hidden
