"""Core attention in Megatron-Core's slot, under tensor parallelism, and the norm."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_distributed

SEQUENCE, BATCH = 24, 2


def install() -> None:
    from phalanx.parallel.megatron.cpu import install as install_cpu

    install_cpu()


def config(**changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    return TransformerConfig(**{**fields, **changes})


def core(
    config: Any,
    pg: Any,
    *,
    layer: int = 1,
    backend: str = "reference",
    exchange: str = "",
    **kwargs: Any,
) -> Any:
    """Built the way Megatron-Core's attention blocks do, through the spec."""
    from megatron.core.transformer.enums import AttnMaskType

    from phalanx.moe.model.attention import core_attention

    return core_attention(backend, exchange=exchange)(
        config=config,
        layer_number=layer,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=pg,
        **kwargs,
    )


def alone() -> Any:
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return SimpleNamespace(tp=one, cp=one)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def statement(
    q_SBHd: torch.Tensor,
    k_SBGd: torch.Tensor,
    v_SBGv: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """[S, B, H * v]: attention of each head as matrices, in the dtype of the inputs."""
    S, _B, H, _ = q_SBHd.shape
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    hidden = (j > i) | (j <= i - window if window else torch.zeros(S, S, dtype=torch.bool))
    heads = []
    for h in range(H):
        g = h * k_SBGd.size(2) // H
        q, k, v = q_SBHd[:, :, h], k_SBGd[:, :, g], v_SBGv[:, :, g]
        weight = torch.einsum("sbd,tbd->bst", q, k).mul(scale).exp().masked_fill(hidden, 0)
        total = weight.sum(-1) + (0 if sinks_H is None else sinks_H[h].exp())
        heads.append(torch.einsum("bst,tbv->sbv", weight / total[..., None], v))
    return torch.cat(heads, -1)


def _layer(changes: dict[str, Any], layer: int, window: int, k: int, v: int) -> None:
    install()
    module = core(
        config(**changes), alone(), layer=layer, softmax_scale=0.4, k_channels=k, v_channels=v
    )
    sinks = None
    if module.softmax_offset is not None:
        sinks = draw(4, seed=3)
        module.load_state_dict({"softmax_offset": sinks})
    shapes = ((4, k), (2, k), (2, v))
    tensors = [draw(SEQUENCE, BATCH, *s, seed=i) for i, s in enumerate(shapes)]
    got = module(*tensors, None)
    expected = statement(
        *(t.double() for t in tensors),
        scale=0.4,
        window=window,
        sinks_H=None if sinks is None else sinks.double(),
    )
    assert got.shape == (SEQUENCE, BATCH, 4 * v) and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "layer", "window", "k", "v"),
    [
        ({}, 1, 0, 8, 8),
        ({}, 1, 0, 24, 16),
        ({"softmax_type": "learnable"}, 1, 0, 8, 8),
        # Megatron-Core's (127, 0) is a window of 128 keys, the query's own included.
        ({"window_size": (4, 0)}, 1, 5, 8, 8),
        ({"window_size": (4, 0)}, 2, 5, 8, 8),
        # Every second layer is full: the first has the window.
        ({"window_size": (4, 0), "window_attn_skip_freq": 2}, 1, 5, 8, 8),
        ({"window_size": (4, 0), "window_attn_skip_freq": 2}, 2, 0, 8, 8),
        (
            {"window_size": (4, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
            3,
            5,
            8,
            8,
        ),
    ],
)
def test_layer_attends(changes: dict[str, Any], layer: int, window: int, k: int, v: int) -> None:
    run_distributed(_layer, 1, changes, layer, window, k, v)


def _default_scale() -> None:
    install()
    tensors = [draw(SEQUENCE, BATCH, n, 8, seed=n) for n in (4, 2, 2)]
    got = core(config(), alone())(*tensors)
    torch.testing.assert_close(
        got, statement(*tensors, scale=1 / math.sqrt(8)), rtol=1e-5, atol=2e-6
    )


def test_default_scale() -> None:
    run_distributed(_default_scale, 1)


def _against_megatron() -> None:
    install()
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from phalanx.parallel.groups import create

    pg = create().pg
    for layer in (1, 2):
        c = config(
            window_size=(4, 0),
            window_attn_skip_freq=2,
            softmax_type="learnable",
            attention_softmax_in_fp32=True,
        )
        stock = DotProductAttention(c, layer, AttnMaskType.causal, "self", pg_collection=pg)
        stock.load_state_dict({"softmax_offset": draw(4, seed=9)})
        ours = core(c, pg, layer=layer)
        ours.load_state_dict(stock.state_dict(), strict=True)
        leaves = [draw(SEQUENCE, BATCH, n, 8, seed=n + 5).requires_grad_() for n in (4, 2, 2)]
        mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
        upstream = draw(SEQUENCE, BATCH, 32, seed=8)
        both = []
        for module in (stock, ours):
            out = module(*leaves, mask)
            both.append(
                [out, *torch.autograd.grad(out, [*leaves, module.softmax_offset], upstream)]
            )
        torch.testing.assert_close(both[1], both[0], rtol=1e-4, atol=1e-5)
        metadata = {"dp_cp_group": pg.dp_cp}
        shards = [m.sharded_state_dict("core_attention.", (), metadata) for m in (stock, ours)]
        assert shards[0].keys() == shards[1].keys() == {"core_attention.softmax_offset"}


def test_equals_megatron_and_shares_its_checkpoints() -> None:
    run_distributed(_against_megatron, 1)


def _sinks_over_tensor_ranks() -> tuple[Any, ...]:
    install()
    from phalanx.parallel.groups import create

    pg = create(tensor=2).pg
    module = core(
        config(softmax_type="learnable", tensor_model_parallel_size=2, sequence_parallel=True), pg
    )
    (shard,) = module.sharded_state_dict("a.", (), {"dp_cp_group": pg.dp_cp}).values()
    sinks = module.softmax_offset
    marks = (sinks.tensor_model_parallel, sinks.partition_dim)
    return shard.key, shard.global_shape, shard.global_offset, shard.local_shape, marks


def test_sinks_are_split_by_head_over_tensor_ranks() -> None:
    ranks = run_distributed(_sinks_over_tensor_ranks, 2)
    for rank, got in enumerate(ranks):
        # The marks make the gradient norm count every rank's heads.
        assert got == ("a.softmax_offset", (4,), (2 * rank,), (2,), (True, 0))


def _refusal(changes: dict[str, Any]) -> None:
    install()
    with pytest.raises(ValueError, match="core attention has no"):
        core(config(**changes), alone())


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.1}, {"softmax_type": "off-by-one"}])
def test_refuses_what_it_would_ignore(changes: dict[str, Any]) -> None:
    run_distributed(_refusal, 1, changes)


def _latent(tensor: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Output and gradients of an MLA block; each with the dimension it is split along, or -1."""
    install()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from phalanx.moe.model.attention import LatentAttention, core_attention
    from phalanx.moe.model.norm import RMSNorm
    from phalanx.parallel.groups import create

    pg = create(tensor=tensor).pg
    c = MLATransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=4,
        rope_type="rope",
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        transformer_impl="local",
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
    )
    spec = get_gpt_layer_local_submodules(qk_layernorm=True, multi_latent_attention=True)
    sub = spec.self_attention.submodules
    sub.core_attention, sub.q_layernorm, sub.kv_layernorm = (
        core_attention("reference"),
        RMSNorm,
        RMSNorm,
    )
    block = LatentAttention(c, sub, layer_number=1, pg_collection=pg)
    rank = dist.get_rank()

    def split(p: torch.nn.Parameter) -> int:
        return p.partition_dim if getattr(p, "tensor_model_parallel", False) else -1

    with torch.no_grad():
        for seed, p in enumerate(block.parameters()):
            shape = list(p.shape)
            if (dim := split(p)) >= 0:
                shape[dim] *= tensor
            whole = draw(*shape, seed=seed) * 0.3
            p.copy_(whole.chunk(tensor, dim)[rank] if dim >= 0 else whole)
    x = draw(SEQUENCE, BATCH, 32, seed=100).chunk(tensor)[rank].requires_grad_()
    out, _ = block(x, None)
    out.backward(draw(SEQUENCE, BATCH, 32, seed=101).chunk(tensor)[rank])
    result = {"out": (0, out.detach()), "x": (0, x.grad)}
    for name, p in block.named_parameters():
        if split(p) < 0:
            dist.all_reduce(
                p.grad, group=pg.tp
            )  # as Megatron-Core does for sequence parallel weights
            assert p.sequence_parallel == (tensor > 1)
        result[name] = (split(p), p.grad)
    return result


@pytest.mark.dist
def test_latent_attention_gradients_do_not_depend_on_tensor_parallelism() -> None:
    (one,) = run_distributed(_latent, 1, 1)
    two = run_distributed(_latent, 2, 2)
    for name, (dim, _) in two[0].items():
        parts = [rank[name][1] for rank in two]
        got = torch.cat(parts, dim) if dim >= 0 else parts[0]
        torch.testing.assert_close(
            got, one[name][1], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def _norm() -> None:
    install()
    from phalanx.moe.model.norm import norm_class

    x64 = draw(SEQUENCE, BATCH, 48, dtype=torch.float64).requires_grad_()
    w64 = draw(48, seed=1, dtype=torch.float64).requires_grad_()
    upstream = draw(SEQUENCE, BATCH, 48, seed=2, dtype=torch.float64)
    expected = x64 / (x64.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w64
    expected = [expected.detach(), *torch.autograd.grad(expected, (x64, w64), upstream)]
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        norm = norm_class("torch")(config(params_dtype=dtype), 48, eps=1e-3)
        norm.load_state_dict({"weight": w64.detach()})
        assert norm.weight.dtype == dtype and not norm.weight.sequence_parallel
        x = x64.detach().to(dtype).requires_grad_()
        out = norm(x)
        grads = torch.autograd.grad(out, (x, norm.weight), upstream.to(dtype))
        for g, e in zip([out, *grads], expected, strict=True):
            assert g.dtype == dtype
            assert (g.double() - e).norm() <= tolerance * e.norm()
    split = config(sequence_parallel=True, tensor_model_parallel_size=2)
    assert norm_class("torch")(split, 48).weight.sequence_parallel
    pair = norm_class("torch", residual=True)(config(), 48, eps=1e-3)
    assert pair.state_dict().keys() == {"weight"}
    alone = norm_class("torch")(config(), 48, eps=1e-3)
    x, residual = draw(SEQUENCE, BATCH, 48), draw(SEQUENCE, BATCH, 48, seed=3)
    normed, total = pair(x, residual)
    assert torch.equal(total, residual + x) and torch.equal(normed, alone(total))
    assert torch.equal(pair(x)[0], alone(x)) and pair(x)[1] is x
    with pytest.raises(ValueError, match="kernels.norm"):
        norm_class("apex")


def test_norm() -> None:
    run_distributed(_norm, 1)
