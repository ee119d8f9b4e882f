"""Model features, alone and together, against the plain PyTorch statement of plain_model.py.

Each model is built from its configuration by `moe.model.gpt.build`, filled with weights that make
every part count, and compared in logits, losses and gradients with the statement in fp64. Where a
feature can be left out of the statement without changing a shape, the test shows that this would be
seen.
"""

import copy
import math
import zlib
from typing import Any

import megatron.core.distributed  # noqa: F401  (imported once for all ranks, which are forked)
import pytest
import torch
import torch.distributed as dist

from tests.moe.cases import install, options
from tests.moe.model.plain_model import PlainModel, frequencies, temperature
from tests.support.distributed import run_distributed

BATCH, SEQUENCE, VOCAB = 2, 48, 64

SMALL = [
    "model=tiny",
    f"model.vocab_size={VOCAB}",
    "model.layers=2",
    "model.hidden=32",
    "model.dense_ffn=48",
    "model.attention.heads=4",
    "model.attention.head_dim=8",
    "model.moe.experts=8",
    "model.moe.ffn=24",
    "model.moe.router.aux_loss=0",
]
MLA = [
    *SMALL,
    "model.attention.kind=mla",
    "model.attention.q_lora_rank=16",
    "model.attention.kv_lora_rank=12",
    "model.attention.qk_nope_dim=8",
    "model.attention.qk_rope_dim=8",
    "model.attention.v_dim=6",
]
YARN = ["model.attention.yarn.factor=8", "model.attention.yarn.original_context=512"]
SIGMOID = ["model.moe.router.score=sigmoid", "model.moe.top_k=4"]
TINY_GPT_OSS = ["model=tiny_gpt_oss", "model.moe.router.aux_loss=0"]
LINEAR = [
    *SMALL,
    "model.linear_attention.full_attention_interval=2",
    "model.linear_attention.key_heads=1",
    "model.linear_attention.value_heads=2",
]
TINY_QWEN3_NEXT = ["model=tiny_qwen3_next", "model.moe.router.aux_loss=0"]
TINY_DEEPSEEK = ["model=tiny_deepseek", "model.moe.router.seq_aux_loss=0"]


def draw(shape: torch.Size | tuple[int, ...], name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def tokens(vocab: int = VOCAB, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-token labels [B, S]."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(0, vocab, (batch, SEQUENCE + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def built(
    overrides: list[str],
    *,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    groups: Any = None,
) -> Any:
    """(config of the run, model on this rank) in fp32 on the reference backends.

    Args:
        groups: those of the layout, of a model before; gloo takes most of a second for new ones.
    """
    install()
    from phalanx.configs.load import load
    from phalanx.moe.model.gpt import Backends, build
    from phalanx.moe.model.megatron_config import Layout, transformer_config
    from phalanx.parallel.groups import create

    cfg = load([*overrides, "precision=fp32", f"data.sequence_length={SEQUENCE}"])
    groups = groups or create(tensor=tensor, context=context, expert=expert)
    config = transformer_config(
        cfg, Layout(tensor=tensor, context=context, expert=expert), on_cpu=True
    )
    moe = options(cfg.model, groups.pg, "reference")
    model = build(cfg, config, pg=groups.pg, backends=Backends(), moe=moe)
    return cfg, model


@torch.no_grad()
def fill(model: Any) -> dict[str, torch.Tensor]:
    """Weights that keep activations near 1 and logits apart; returned in fp64 by name."""
    state = {}
    named = [*model.named_parameters()]
    named += [(n, b) for n, b in model.named_buffers() if n.endswith("expert_bias")]
    for name, tensor in named:
        value = draw(tensor.shape, name)
        if "norm" in name:
            value = 0.2 * value + (0 if model.config.layernorm_zero_centered_gamma else 1)
        elif "bias" in name or name.endswith((".b1", ".b2")):
            value = 0.3 * value
        elif tensor.dim() == 3 and "conv1d" in name:
            value = value / 2
        elif tensor.dim() > 1 and "embedding" not in name:
            value = value * 1.5 / math.sqrt(tensor.size(-1))
        tensor.copy_(value)
        state[name] = tensor.double()
    return state


def positions(length: int = SEQUENCE) -> torch.Tensor:
    return torch.arange(length)[None].expand(BATCH, -1)


def _logits(overrides: list[str], without: list[tuple[str, Any]]) -> None:
    cfg, model = built(overrides)
    state = fill(model)
    ids, _ = tokens(cfg.model.vocab_size)
    with torch.no_grad():
        got = model(ids, positions(), None)
        expected = PlainModel(cfg.model, state).logits(ids)
    assert got.dtype == torch.float32 and expected.std() > 0.3
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-4)
    for path, value in without:
        other = copy.deepcopy(cfg.model)
        *parents, leaf = path.split(".")
        node = other
        for parent in parents:
            node = getattr(node, parent)
        assert getattr(node, leaf) != value
        setattr(node, leaf, value)
        with torch.no_grad():
            seen = PlainModel(other, state).logits(ids) - expected
        assert seen.abs().max() > 1e-2, f"{path}={value} makes no difference"


FEATURES: dict[str, tuple[list[str], list[tuple[str, Any]]]] = {
    "gqa_rope": ([*SMALL, "model.attention.kv_heads=2"], [("attention.rope_theta", 100.0)]),
    "mha": ([*SMALL, "model.attention.kv_heads=4"], []),
    "attention_bias": ([*SMALL, "model.bias=true"], []),
    "tied_embeddings": ([*SMALL, "model.tie_embeddings=true"], []),
    "norm_eps": ([*SMALL, "model.norm_eps=0.1"], [("norm_eps", 1e-5)]),
    "qk_norm": ([*SMALL, "model.attention.qk_norm=true"], [("attention.qk_norm", False)]),
    "qk_norm_over_all_heads": (
        [*SMALL, "model.attention.qk_norm=true", "model.attention.qk_norm_over=projection"],
        [("norm_eps", 0.5)],
    ),
    "qk_norm_over_all_heads_with_biases": (
        [
            *[*SMALL, "model.attention.qk_norm=true", "model.attention.qk_norm_over=projection"],
            *["model.attention.kv_heads=2", "model.attention.qkv_bias=true"],
            "model.attention.rotary_dim=4",
        ],
        [("attention.rotary_dim", 0)],
    ),
    "biases_of_queries_keys_values": (
        [*SMALL, "model.attention.qkv_bias=true", "model.attention.qk_norm=true"],
        [("attention.qk_norm", False)],
    ),
    "partial_rotary": (
        [*SMALL, "model.attention.rotary_dim=4", "model.attention.kv_heads=2"],
        [("attention.rotary_dim", 0), ("attention.rotary_dim", 2)],
    ),
    "partial_rotary_after_norms": (
        [*SMALL, "model.attention.rotary_dim=6", "model.attention.qk_norm=true"],
        [("attention.rotary_dim", 0)],
    ),
    "yarn_gqa": (
        [*SMALL, *YARN, "model.attention.head_dim=32"],
        [
            ("attention.yarn.factor", 1.0),
            ("attention.yarn.mscale", 0.0),
            ("attention.yarn.beta_fast", 4.0),
            ("attention.yarn.beta_slow", 0.1),
        ],
    ),
    "yarn_not_truncated": (
        [*SMALL, *YARN, "model.attention.head_dim=32", "model.attention.yarn.truncate=false"],
        [("attention.yarn.truncate", True)],
    ),
    "window": ([*SMALL, "model.attention.window=5"], [("attention.window", 6)]),
    "window_every_second_layer": (
        [*SMALL, "model.attention.window=5", "model.attention.window_every=2"],
        [("attention.window", 0), ("attention.window_every", 1), ("attention.window_every", 3)],
    ),
    "sinks": ([*SMALL, "model.attention.sinks=true"], [("attention.sinks", False)]),
    "mla": (MLA, [("attention.rope_theta", 100.0)]),
    "mla_direct_query": ([*MLA, "model.attention.q_lora_rank=0"], []),
    "mla_yarn": (
        [*MLA, *YARN, "model.attention.yarn.mscale=1.0", "model.attention.yarn.mscale_all_dim=1.0"],
        [("attention.yarn.factor", 1.0), ("attention.yarn.mscale_all_dim", 0.0)],
    ),
    "mla_yarn_rotary_temperature": (
        [*MLA, *YARN, "model.attention.yarn.mscale=1.0", "model.attention.yarn.mscale_all_dim=0.5"],
        [("attention.yarn.mscale", 0.5)],
    ),
    "swiglu": (SMALL, [("moe.activation", "geglu")]),
    "geglu": ([*SMALL, "model.moe.activation=geglu"], [("moe.activation", "quick_geglu")]),
    "squared_relu": ([*SMALL, "model.moe.activation=squared_relu"], []),
    "clamped_quick_geglu": (
        [
            *SMALL,
            "model.moe.activation=quick_geglu",
            "model.moe.activation_limit=0.7",
            "model.moe.activation_offset=1.0",
        ],
        [
            ("moe.activation_limit", 0.0),
            ("moe.activation_limit", 7.0),
            ("moe.activation_offset", 0.0),
            ("moe.activation_alpha", 1.0),
        ],
    ),
    "clamped_dense_mlp": (
        [
            *SMALL,
            "model.moe.dense_layers=2",
            "model.moe.activation=quick_geglu",
            "model.moe.activation_limit=0.7",
            "model.moe.activation_offset=1.0",
        ],
        [("moe.activation_limit", 0.0), ("moe.activation_offset", 0.0)],
    ),
    "leading_dense_layer": ([*SMALL, "model.moe.dense_layers=1"], []),
    "shared_expert": ([*SMALL, "model.moe.shared_ffn=40"], [("moe.shared_ffn", 0)]),
    "softmax_over_topk": (
        [*SMALL, "model.moe.router.softmax_over=topk", "model.moe.router.normalize=false"],
        [("moe.router.softmax_over", "all")],
    ),
    "softmax_not_normalized": (
        [*SMALL, "model.moe.router.normalize=false"],
        [("moe.router.normalize", True)],
    ),
    "sigmoid_scaled": (
        [*SMALL, *SIGMOID, "model.moe.router.scale=2.5"],
        [("moe.router.score", "softmax"), ("moe.router.scale", 1.0)],
    ),
    "group_limited": (
        [*SMALL, *SIGMOID, "model.moe.router.groups=4", "model.moe.router.group_topk=2"],
        [("moe.router.groups", 1)],
    ),
    "expert_bias": ([*SMALL, *SIGMOID, "model.moe.router.bias_rate=1e-3"], []),
    "output_gate": (
        [*SMALL, "model.attention.output_gate=true", "model.attention.kv_heads=2"],
        [],
    ),
    "output_gate_of_normed_heads_with_biases": (
        [
            *[*SMALL, "model.attention.output_gate=true", "model.attention.qkv_bias=true"],
            *["model.attention.qk_norm=true", "model.attention.rotary_dim=4"],
        ],
        [("attention.rotary_dim", 0), ("attention.qk_norm", False)],
    ),
    "zero_centered_norms": (
        [*SMALL, "model.norm_zero_centered=true", "model.attention.qk_norm=true"],
        [("norm_zero_centered", False)],
    ),
    "zero_centered_norms_over_all_heads": (
        [
            *[*SMALL, "model.norm_zero_centered=true", "model.attention.qk_norm=true"],
            "model.attention.qk_norm_over=projection",
        ],
        [("norm_zero_centered", False)],
    ),
    "shared_gate": (
        [*SMALL, "model.moe.shared_ffn=40", "model.moe.shared_gate=true"],
        [("moe.shared_gate", False)],
    ),
    "linear_attention": (LINEAR, [("norm_eps", 0.5)]),
    "linear_attention_alone": (
        [*LINEAR, "model.linear_attention.full_attention_interval=3"],
        [("norm_eps", 0.5)],
    ),
    "tiny_qwen3_next": (TINY_QWEN3_NEXT, [("moe.shared_gate", False)]),
    "tiny_dense": (
        ["model=tiny_dense", "model.mtp_layers=1"],
        [("attention.qk_norm", False), ("norm_eps", 0.5)],
    ),
    "tiny_gpt_oss": (TINY_GPT_OSS, [("attention.window", 31), ("attention.sinks", False)]),
    "tiny_deepseek": (TINY_DEEPSEEK, [("moe.shared_ffn", 0), ("moe.router.scale", 1.0)]),
}


@pytest.mark.parametrize("name", FEATURES)
def test_logits(name: str) -> None:
    run_distributed(_logits, 1, *FEATURES[name])


def _training(overrides: list[str]) -> None:
    from phalanx.moe.model.loss import LossContext

    cfg, model = built(overrides)
    state = fill(model)
    ids, labels = tokens(cfg.model.vocab_size)
    losses = LossContext(labels_ahead_K=torch.tensor([ids.numel() - len(ids)]))
    got = model(ids, positions(), None, labels=labels, losses=losses).mean()
    got.backward()

    leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
    main, ahead = PlainModel(cfg.model, leaves).losses(ids, labels)
    (main + cfg.model.mtp_loss * ahead).backward()
    torch.testing.assert_close(got.double(), main.detach(), rtol=1e-5, atol=1e-5)
    assert len(losses.losses_ahead) == cfg.model.mtp_layers
    for value in losses.losses_ahead:
        torch.testing.assert_close(value.double(), ahead.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        expected = leaves[name].grad
        assert parameter.grad is not None and expected.norm() > 0, name
        error = (parameter.grad.double() - expected).norm() / expected.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    "overrides",
    [
        TINY_GPT_OSS,
        TINY_DEEPSEEK,
        TINY_QWEN3_NEXT,
        [*SMALL, "model.attention.qk_norm=true", "model.mtp_layers=1", "model.mtp_loss=0.3"],
        FEATURES["qk_norm_over_all_heads_with_biases"][0],
        FEATURES["partial_rotary_after_norms"][0],
        [*TINY_GPT_OSS, "run.recompute=attention"],
        [*TINY_DEEPSEEK, "run.recompute=attention"],
        [*LINEAR, "run.recompute=full"],
        FEATURES["output_gate_of_normed_heads_with_biases"][0],
        FEATURES["zero_centered_norms"][0],
    ],
    ids=[
        "gpt_oss",
        "deepseek",
        "qwen3_next",
        "gqa_mtp",
        "over_heads",
        "partial_rotary",
        "gpt_oss_recompute",
        "deepseek_recompute",
        "linear_recompute",
        "output_gate",
        "zero_centered",
    ],
)
def test_losses_and_gradients(overrides: list[str]) -> None:
    run_distributed(_training, 1, overrides)


def _rotary(overrides: list[str]) -> tuple[torch.Tensor, float, float]:
    """Frequencies in use, factor on rotated channels, and scale of the logits times sqrt(d)."""
    cfg, model = built(overrides)
    block = model.decoder.layers[0].self_attention
    scale = block.core_attention.scale
    if cfg.model.attention.kind == "mla":
        emb, factor = block.rotary_pos_emb(2)
        d = cfg.model.attention.qk_nope_dim + cfg.model.attention.qk_rope_dim
    else:
        emb, factor = model.rotary_pos_emb(2)
        assert factor == block._yarn_concentration_factor
        d = cfg.model.attention.head_dim
    half = emb.size(-1) // 2
    assert torch.equal(emb[..., :half], emb[..., half:])
    return emb[1, 0, 0, :half].double(), factor, scale * math.sqrt(d)


def test_yarn_of_gpt_oss() -> None:
    """openai/gpt-oss-20b: head_dim 64, theta 150000, factor 32 from 4096, not truncated."""
    from phalanx.configs.load import load

    published = ["model=gpt_oss_20b"]
    a = load(published).model.attention
    shrunk = [*published, "model.layers=1", "model.hidden=64", "model.vocab_size=64"]
    (got,) = run_distributed(_rotary, 1, [*shrunk, "model.moe.experts=4", "model.moe.ffn=8"])
    frequency, factor, scale = got
    torch.testing.assert_close(frequency, frequencies(a, 64), rtol=1e-6, atol=0)
    assert factor == pytest.approx(0.1 * math.log(32) + 1)
    assert scale == pytest.approx(1)
    # Ends of the ramp at 8.09 and 17.40 of 32 indices: below it unchanged, above it divided by 32.
    plain = 150000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(frequency[:9], plain[:9], rtol=1e-6, atol=0)
    torch.testing.assert_close(frequency[18:], plain[18:] / 32, rtol=1e-6, atol=0)
    assert ((frequency < plain * 0.999) & (frequency > plain / 31.9))[9:18].all()


def test_yarn_of_deepseek_v3() -> None:
    """deepseek-ai/DeepSeek-V3: rotary 64, theta 10000, factor 40 from 4096, both mscale 1."""
    from phalanx.configs.load import load

    published = ["model=deepseek_v3"]
    a = load(published).model.attention
    shrunk = [*published, "model.layers=1", "model.hidden=64", "model.vocab_size=64"]
    shrunk += ["model.attention.heads=2", "model.moe.experts=64", "model.moe.ffn=8"]
    shrunk += ["model.moe.dense_layers=0", "model.mtp_layers=0", "model.moe.shared_ffn=8"]
    (got,) = run_distributed(_rotary, 1, shrunk)
    frequency, factor, scale = got
    torch.testing.assert_close(frequency, frequencies(a, 64), rtol=1e-6, atol=0)
    assert factor == 1.0
    assert scale == pytest.approx(1.8738, abs=1e-4)
    assert scale == pytest.approx(temperature(40, 1) ** 2)
    # The ramp runs from index 10 to 23 of 32.
    plain = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(frequency[:11], plain[:11], rtol=1e-6, atol=0)
    torch.testing.assert_close(frequency[23:], plain[23:] / 40, rtol=1e-6, atol=0)


def _context_parallel(overrides: list[str], ranks: int) -> dict[str, torch.Tensor]:
    """Mean loss over all tokens and its gradients, summed over ranks."""
    cfg, model = built(overrides, context=ranks)
    fill(model)
    rank = dist.get_rank()
    mine = [rank, 2 * ranks - 1 - rank]

    def dealt(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.chunk(2 * ranks, 1)[c] for c in mine], 1).contiguous()

    ids, labels = (dealt(x) for x in tokens(cfg.model.vocab_size))
    where = dealt(positions())
    loss = model(ids, where, None, labels=labels).mean() / ranks
    loss.backward()
    result = {"loss": loss.detach()}
    dist.all_reduce(result["loss"])
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        result[name] = parameter.grad
    return result


@pytest.mark.dist
@pytest.mark.parametrize(
    "overrides",
    [TINY_GPT_OSS, [*TINY_DEEPSEEK, "model.mtp_layers=0"]],
    ids=["gpt_oss", "deepseek"],
)
def test_context_parallel_model_equals_one_rank(overrides: list[str]) -> None:
    (one,) = run_distributed(_context_parallel, 1, overrides, 1)
    two = run_distributed(_context_parallel, 2, overrides, 2)[0]
    for name, expected in one.items():
        error = (two[name] - expected).norm() / expected.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"
