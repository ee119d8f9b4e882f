"""Parameters and FLOPs against published counts, and against the model that is really built."""

import pytest
import torch

from phalanx.configs.arithmetic.accounting import (
    active_parameters,
    bf16_peak,
    flops_per_token,
    fp8_peak,
    parameters,
)
from phalanx.configs.load import load, options
from phalanx.configs.schema import ModelConfig
from tests.support.distributed import run_distributed


def model(name: str, *overrides: str) -> ModelConfig:
    return load([f"model={name}", *overrides]).model


def billions(count: float, digits: int) -> float:
    return round(count / 1e9, digits)


@pytest.mark.parametrize(
    ("name", "total", "active", "digits"),
    [
        ("deepseek_v3", 671, 37, 0),
        ("deepseek_v3", 671.0, 36.6, 1),  # README_WEIGHTS.md of the repository
        ("gpt_oss_20b", 20.91, 3.61, 2),  # model card, table 1
        ("gpt_oss_120b", 116.83, 5.13, 2),
        ("deepseek_v3_l4", 37.0, 3.3, 1),
        ("kimi_k2", 1026, 32, 0),  # weights; the model card says 1 T and 32 B
        ("mixtral_8x22b", 141, 39, 0),  # announcement
    ],
)
def test_published_parameters(name: str, total: float, active: float, digits: int) -> None:
    m = model(name)
    assert billions(parameters(m, mtp=False).total, digits) == total
    assert billions(active_parameters(m).total, digits) == active


def test_qwen3_counts_its_input_embedding_as_active() -> None:
    m = model("qwen3_30b_a3b")
    counts = parameters(m)
    assert billions(counts.total, 1) == 30.5
    assert billions(counts.total - counts.embedding - counts.head, 1) == 29.9
    assert int((active_parameters(m).total + counts.embedding) / 1e8) / 10 == 3.3


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("qwen3_235b_a22b", 235_093_634_560),
        ("mixtral_8x7b", 46_702_792_704),
        ("mixtral_8x22b", 140_620_634_112),
        ("deepseek_v2_lite", 15_706_484_224),
        ("olmoe_1b_7b", 6_919_161_856),
        ("glm_4_5", 358_337_791_296),
        ("glm_4_5_air", 110_468_824_832),
        ("minimax_m2", 228_703_644_928),
    ],
)
def test_published_tensors_have_as_many_elements(name: str, elements: int) -> None:
    """The number that Hugging Face counts in the safetensors.

    Expert biases, a second embedding and head for prediction layers, and a scale for each 128 x 128
    values in FP8 are included.
    """
    m = model(name)
    e, a, blocks = m.moe, m.attention, 0
    biases = (m.layers - e.dense_layers + m.mtp_layers) * e.experts * bool(e.router.bias_rate)
    repeated = 2 * m.mtp_layers * m.vocab_size * m.hidden
    if name == "minimax_m2":
        of_experts = 3 * e.experts * e.ffn * m.hidden
        of_attention = 2 * (a.heads + a.kv_heads) * a.head_dim * m.hidden
        blocks = m.layers * (of_experts + of_attention) // 128**2
    assert parameters(m).total + biases + repeated + blocks == elements


@pytest.mark.parametrize(
    ("name", "active", "embedding", "head"),
    [
        ("qwen3_235b_a22b", 22, True, True),
        ("mixtral_8x7b", 12.9, True, True),
        ("olmoe_1b_7b", 1.3, True, True),
        ("glm_4_5", 32, False, False),
        ("glm_4_5_air", 12, False, False),
        ("minimax_m2", 10, False, True),
    ],
)
def test_published_active_parameters(name: str, active: float, embedding: bool, head: bool) -> None:
    """Each counts the input embedding and the head, or does not."""
    m = model(name)
    parts = active_parameters(m)
    count = parts.total + embedding * parameters(m).embedding - (not head) * parts.head
    assert billions(count, 1 if active % 1 else 0) == active


def test_deepseek_v2_lite_rounds_its_active_parameters_down() -> None:
    assert int(active_parameters(model("deepseek_v2_lite")).total / 1e8) / 10 == 2.4


def test_moonlight_counts_neither_embedding_nor_head() -> None:
    m = model("moonlight_16b_a3b")
    counts, active = parameters(m), active_parameters(m)
    assert billions(counts.total, 2) == 15.96
    assert billions(counts.total - counts.embedding - counts.head, 2) == 15.29
    assert billions(active.total - active.head, 2) == 2.24


def test_multi_token_prediction_of_deepseek_v3() -> None:
    m = model("deepseek_v3")
    extra = parameters(m).total - parameters(m, mtp=False).total
    assert extra == pytest.approx(11.5e9, rel=0.02)
    assert parameters(m).mtp_projection == 2 * 7168 * 7168


@pytest.mark.parametrize(
    ("name", "gigaflops"),
    [
        ("deepseek_v3", 260.0),
        ("deepseek_v3 model.mtp_layers=0", 249.8),
        ("deepseek_v3_l4", 21.6),
        ("gpt_oss_20b", 22.9),
        ("gpt_oss_120b", 32.6),
        ("moonlight_16b_a3b", 17.15),
        ("qwen3_30b_a3b", 23.0),
        ("qwen3_235b_a22b", 148.0),
        ("mixtral_8x7b", 79.7),
        ("mixtral_8x22b", 242.2),
        ("deepseek_v2_lite", 16.39),
        ("kimi_k2", 204.5),
        ("olmoe_1b_7b", 7.87),
        ("glm_4_5", 231.8),
        ("glm_4_5_air", 96.4),
        ("minimax_m2", 71.6),
    ],
)
def test_flops_per_token_at_4096(name: str, gigaflops: float) -> None:
    assert flops_per_token(model(*name.split()), 4096) / 1e9 == pytest.approx(gigaflops, rel=2e-3)


def test_flops_are_six_per_active_weight_plus_attention() -> None:
    """Without window, norms, biases and router the two counts meet."""
    m = model("tiny", "model.moe.router.aux_loss=0")
    active = active_parameters(m)
    weights = active.total - active.norms - active.router
    length = 64
    # Score and value products, forward and twice backward, over half of the length x length square.
    attention = 3 * m.layers * 2 * (2 * m.attention.heads * m.attention.head_dim * length / 2)
    assert flops_per_token(m, length) == 6 * weights + attention


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_window_is_exact(window: int) -> None:
    length, base = 8, ["tiny", "model.layers=1", "model.attention.heads=4"]
    full = flops_per_token(model(*base), length)
    cut = flops_per_token(model(*base, f"model.attention.window={window}"), length)
    per_key = 3 * 2 * 2 * 4 * 32
    if window >= length:
        assert cut == full
    else:
        seen = sum(min(position + 1, window) for position in range(length)) / length
        assert cut - full == pytest.approx(per_key * (seen - length / 2))


def test_alternating_window_leaves_every_second_layer_full() -> None:
    counts = {
        every: flops_per_token(
            model("tiny", "model.attention.window=8", f"model.attention.window_every={every}"), 256
        )
        for every in (1, 2, 4)
    }
    full = flops_per_token(model("tiny"), 256)
    assert full - counts[2] == pytest.approx((full - counts[1]) / 2)
    assert full - counts[4] == pytest.approx((full - counts[1]) * 3 / 4)


def test_tied_embeddings_count_once_but_multiply() -> None:
    apart, tied = model("tiny"), model("tiny", "model.tie_embeddings=true")
    once = apart.vocab_size * apart.hidden
    assert parameters(apart).total - parameters(tied).total == once
    assert active_parameters(apart) == active_parameters(tied)
    assert flops_per_token(apart, 64) == flops_per_token(tied, 64)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_are_dense(name: str, peak: float | None) -> None:
    assert bf16_peak(name) == peak


def test_fp8_is_twice_as_fast_where_there_is_fp8() -> None:
    assert fp8_peak("NVIDIA H200") == 2 * 989
    assert fp8_peak("NVIDIA A100-SXM4-80GB") is fp8_peak("NVIDIA GeForce RTX 4090") is None


def count_built(names: list[str]) -> dict[str, int]:
    """Parameters of the real models, built on the meta device by one rank."""
    from phalanx.parallel.megatron import cpu

    cpu.install()
    from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
    from phalanx.moe.layer import MoEOptions
    from phalanx.moe.model.gpt import Backends, build
    from phalanx.moe.model.kernel_facts import activation_of
    from phalanx.moe.model.megatron_config import Layout, transformer_config
    from phalanx.parallel.dispatcher.capacity import Budget
    from phalanx.parallel.dispatcher.transport import LOCAL
    from phalanx.parallel.groups import create
    from tests.moe.on_meta import OnMeta

    groups = create(tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1)
    counts = {}
    for name in names:
        cfg = load(name.split())
        e = cfg.model.moe
        spec = MLPSpec(activation_of(e), "reference")
        budget = Budget(1.0, device=torch.device("cpu"))
        config = transformer_config(cfg, Layout(), on_cpu=True)
        with OnMeta():
            built = build(
                cfg,
                config,
                pg=groups.pg,
                backends=Backends(),
                moe=MoEOptions(e, spec, LOCAL, budget),
            )
        counts[name] = sum(p.numel() for p in built.parameters())
    return counts


def test_the_model_that_is_built_has_the_parameters_that_are_counted() -> None:
    # Eight have layers of every kind.
    few = {name: min(model(name).layers, 8) for name in options("model")}
    names = [f"model={name} model.layers={layers}" for name, layers in few.items()]
    names += ["model=tiny model.attention.qk_norm=true", "model=tiny model.tie_embeddings=true"]
    names += ["model=tiny_gpt_oss model.moe.activation=squared_relu model.moe.activation_limit=0"]
    names += ["model=tiny_gpt_oss model.moe.dense_layers=1", "model=tiny_dense model.mtp_layers=1"]
    (built,) = run_distributed(count_built, 1, names)
    counted = {name: parameters(load(name.split()).model).total for name in names}
    assert built == counted
