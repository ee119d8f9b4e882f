"""Operations that other libraries have too: ours and theirs on the same data.

Legend: S positions, B batch, H query heads, G key-value heads, N = H / G + 2, d channels, F rotated
channels, T tokens, E experts, K experts per token.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.configs.schema import RouterConfig
from phalanx.kernels.core_attention.latent import keys_values
from phalanx.kernels.core_attention.qkv import HeadNorms, queries_keys_values
from phalanx.kernels.core_attention.rope import rope_
from phalanx.moe.router import fused_topk
from phalanx.parallel.megatron.adam import AdamW
from phalanx.scripts.lab.bench.libraries.compared import Operation, Row, compare, gap, row
from phalanx.scripts.lab.bench.timing import Bench, Case, reason

BF16, FP32 = torch.bfloat16, torch.float32
NOPE, ROTARY, VALUE = 128, 64, 128
"""Channels of a latent head in every published model: without rotation, rotated (shared), value."""
MLA_HEADS = {"DeepSeek-V3": 128, "Moonlight": 16}
ROUTERS = {
    "DeepSeek-V3": (
        256,
        8,
        RouterConfig(score="sigmoid", groups=8, group_topk=4, scale=2.5, bias_rate=1e-3),
    ),
    "Qwen3": (128, 8, RouterConfig(score="softmax")),
    "GPT-OSS": (32, 4, RouterConfig(score="softmax", softmax_over="topk")),
}  # experts, experts per token, options
Makers = tuple[Callable[[], Operation], Callable[[], Operation]]
"""Functions that build our side and the library's."""


class Heads(NamedTuple):
    """Head counts of grouped-query attention."""

    queries: int
    keys: int
    channels: int
    biased: bool  # the projection has a bias


ROPE_HEADS = {"Qwen3": Heads(32, 4, 128, False), "GPT-OSS": Heads(64, 8, 64, True)}


class Sizes(NamedTuple):
    """Problem sizes."""

    positions: int = 4096
    batches: tuple[int, ...] = (1, 4)
    parameters: int = 1 << 30
    tensors: int = 64  # number of tensors that the parameters are split into


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    g = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=g, device=device, dtype=FP32).to(dtype)


def angles(positions: int, channels: int, device: torch.device) -> Tensor:
    """fp32 [S, 1, 1, channels], both halves the same."""
    rate = 10000 ** (-torch.arange(0, channels, 2, device=device, dtype=FP32) / channels)
    turns = torch.arange(positions, device=device, dtype=FP32)[:, None] * rate
    return torch.cat([turns, turns], -1)[:, None, None]


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def mla(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Rotary embedding of latent attention, in place, against Megatron-Core's fused kernels for it.

    Theirs take bf16 cosines and sines, as Megatron-Core passes them.
    """
    for model, H in MLA_HEADS.items():
        for B in sizes.batches:
            shape, case = (sizes.positions, B, H), f"{model}, {sizes.positions} x {B}"
            for part, sides in (("queries", _queries), ("keys and values", _keys_values)):
                builders = sides(*shape, device=bench.clock.device)
                yield compare(bench, f"MLA {part}, {case}", "Megatron-Core", *builders)
                del builders
                bench.clock.free()


def _queries(S: int, B: int, H: int, *, device: torch.device) -> Makers:
    freqs = angles(S, ROTARY, device)
    q, dq = (drawn(S, B, H, NOPE + ROTARY, device=device, seed=seed) for seed in (1, 2))

    def ours() -> Operation:
        (x,) = _leaves(q)
        args: dict[str, Any] = dict(heads=H, interleaved=True, first=NOPE)
        return Operation(lambda: [rope_(_Writable.apply(x), freqs, **args)], [x], [dq.clone()])

    def theirs() -> Operation:
        from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

        (x,), cos, sin = _leaves(q), freqs.cos().to(BF16), freqs.sin().to(BF16)
        rotate = fused.fused_apply_mla_rope_for_q
        return Operation(lambda: [rotate(x, cos, sin, NOPE, ROTARY)], [x], [dq.clone()])

    return ours, theirs


class _Writable(torch.autograd.Function):
    """Heads [S, B, H, d] as a writable [S, B, H * d] without a copy, like a projection's output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.data.flatten(2).data

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.view(ctx.shape)


def _keys_values(S: int, B: int, H: int, *, device: torch.device) -> Makers:
    freqs = angles(S, ROTARY, device)
    kv = drawn(S, B, H, NOPE + VALUE, device=device, seed=3)
    shared = drawn(S, B, ROTARY, device=device, seed=4)
    widths = (NOPE + ROTARY, VALUE)
    grads = [drawn(S, B, H, width, device=device, seed=width) for width in widths]

    def ours() -> Operation:
        x, part = leaves = _leaves(kv, shared)
        return Operation(lambda: keys_values(x, part, freqs, nope=NOPE), leaves, grads)

    def theirs() -> Operation:
        from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

        x, part = leaves = _leaves(kv, shared)
        angle, parts = (freqs.cos().to(BF16), freqs.sin().to(BF16)), (ROTARY, NOPE, VALUE)
        join = fused.fused_apply_mla_rope_for_kv
        return Operation(lambda: join(x, part[:, :, None], *angle, *parts), leaves, grads)

    return ours, theirs


def routers(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Top-k and weights of a router, against Transformer Engine's dense map and its indices."""
    device = bench.clock.device
    for model, (E, K, options) in ROUTERS.items():
        for B in sizes.batches:
            T = sizes.positions * B
            case = _Router(
                drawn(T, E, device=device, dtype=FP32, seed=6),
                drawn(1, E, device=device, dtype=FP32, seed=7)[0] / 8,
                drawn(T, K, device=device, dtype=FP32, seed=8),
                options,
            )
            for library, indices in (("TE map", False), ("TE indices", True)):
                theirs = lambda c=case, i=indices: c.theirs(i)  # noqa: E731
                yield compare(bench, f"router, {model}, {T} tokens", library, case.ours, theirs)
            bench.clock.free()


class _Router:
    """A router's logits [T, E] and the gradient of its probabilities [T, K]."""

    def __init__(self, logits: Tensor, bias: Tensor, dprob: Tensor, options: RouterConfig) -> None:
        self.logits, self.dprob, self.options = logits, dprob, options
        self.bias = bias if options.bias_rate else None

    def ours(self) -> Operation:
        (x,), K = _leaves(self.logits), self.dprob.shape[1]
        return Operation(
            lambda: [fused_topk.topk(x, self.bias, self.options, K)[1]], [x], [self.dprob]
        )

    def theirs(self, indices: bool) -> Operation:
        from transformer_engine.pytorch.router import fused_topk_with_score_function as fused

        (x,), K, o = _leaves(self.logits), self.dprob.shape[1], self.options
        limited = o.group_topk < o.groups
        options: dict[str, Any] = dict(
            topk=K,
            use_pre_softmax=False,
            num_groups=o.groups if limited else None,
            group_topk=o.group_topk if limited else None,
            scaling_factor=o.scale,
            score_function=o.score,
            expert_bias=self.bias,
        )
        if indices:
            options["topk_indices"] = torch.empty(len(x), K, dtype=torch.int32, device=x.device)
        with torch.no_grad():
            idx = fused_topk.topk(self.logits, self.bias, o, K)[0].long()
        dense = torch.zeros_like(self.logits).scatter_(1, idx, self.dprob)
        return Operation(lambda: [fused(x, **options)[0]], [x], [dense], lambda p: p.gather(1, idx))


def ropes(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Rotary embedding of a mixed projection plus its bias, against Transformer Engine's."""
    for model, heads in ROPE_HEADS.items():
        for B in sizes.batches:
            S, bias = sizes.positions, " with bias" if heads.biased else ""
            builders = _mixed(S, B, heads, device=bench.clock.device)
            yield compare(bench, f"rope, {model}{bias}, {S} x {B}", "TE", *builders)
            del builders
            bench.clock.free()


def _mixed(S: int, B: int, heads: Heads, *, device: torch.device) -> Makers:
    H, G, d, biased = heads
    N, freqs = H // G + 2, angles(S, d, device)
    mixed = [drawn(S, B, G, N, d, device=device, seed=9)]
    mixed += [drawn(G, N, d, device=device, seed=10)] if biased else []
    grads = [drawn(S, B, n, d, device=device, seed=11) for n in (H, G, G)]

    def ours() -> Operation:
        x, *bias = leaves = _leaves(*mixed)
        return Operation(
            lambda: queries_keys_values(x, bias[0] if bias else None, freqs), leaves, grads
        )

    def theirs() -> Operation:
        from transformer_engine.pytorch.attention import rope as library

        x, *bias = leaves = _leaves(*mixed)
        fused, parts = library.apply_fused_qkv_rotary_pos_emb, [(N - 2) * d, d, d]

        def forward() -> Sequence[Tensor]:
            qkv = (x + bias[0] if bias else x).flatten(3)
            return fused(qkv, freqs, freqs, parts)  # type: ignore[no-any-return]

        return Operation(forward, leaves, grads)

    return ours, theirs


def heads(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """The same with query and key norms, against Transformer Engine's norms and rotation."""
    shape = ROPE_HEADS["Qwen3"]
    for B in sizes.batches:
        S = sizes.positions
        builders = _normed(S, B, shape, device=bench.clock.device)
        yield compare(bench, f"norms and rope, Qwen3, {S} x {B}", "TE", *builders)
        del builders
        bench.clock.free()


def _normed(S: int, B: int, heads: Heads, *, device: torch.device) -> Makers:
    H, G, d, _ = heads
    N, freqs, eps = H // G + 2, angles(S, d, device), 1e-6
    weights = [1 + drawn(1, d, device=device, seed=seed)[0] / 8 for seed in (12, 13)]
    operands = [drawn(S, B, G, N, d, device=device, seed=9), *weights]
    grads = [drawn(S, B, n, d, device=device, seed=n) for n in (H, G, G)]

    def ours() -> Operation:
        x, queries, keys = leaves = _leaves(*operands)
        norms = HeadNorms(queries, keys, eps)
        return Operation(lambda: queries_keys_values(x, None, freqs, norms=norms), leaves, grads)

    def theirs() -> Operation:
        import transformer_engine.pytorch as te

        x, *scales = leaves = _leaves(*operands)
        norms = [te.RMSNorm(d, eps=eps, dtype=BF16, device=device) for _ in scales]
        for norm, scale in zip(norms, scales, strict=True):
            norm.weight = torch.nn.Parameter(scale.detach())
        leaves = [x, *(norm.weight for norm in norms)]

        def forward() -> Sequence[Tensor]:
            from transformer_engine.pytorch.attention import rope as library

            q, k, v = x.split([N - 2, 1, 1], -2)
            parts = [q.flatten(2, 3), k.squeeze(-2)]
            turned = [
                library.apply_rotary_pos_emb(norm(part), freqs, tensor_format="sbhd", fused=True)
                for norm, part in zip(norms, parts, strict=True)
            ]
            return *turned, v.squeeze(-2).contiguous()

        return Operation(forward, leaves, grads)

    return ours, theirs


def adam(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """An optimizer step, against FusedAdam, from the same parameters and gradients."""
    half: dict[str, Any] = dict(exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16)
    split: dict[str, Any] = dict(
        half, master_weights=True, store_param_remainders=True, use_decoupled_grad=True
    )
    for name, dtype, ours, theirs in (
        ("fp32", FP32, {}, {}),
        ("bf16 moments", FP32, dict(moments=BF16), half),
        (
            "bf16 moments and remainders",
            BF16,
            dict(moments=BF16, use_decoupled_grad=True),
            split,
        ),
    ):
        yield [_step(bench, f"Adam, {name}, {sizes.parameters:,}", sizes, dtype, ours, theirs)]
        bench.clock.free()


def _step(
    bench: Bench,
    operation: str,
    sizes: Sizes,
    dtype: torch.dtype,
    ours: dict[str, Any],
    theirs: dict[str, Any],
) -> Row:
    device, each = bench.clock.device, sizes.parameters // sizes.tensors
    start = [drawn(each, device=device, dtype=dtype, seed=n) for n in range(sizes.tensors)]
    grads = [drawn(each, device=device, dtype=FP32, seed=1000 + n) for n in range(sizes.tensors)]
    attribute = "decoupled_grad" if dtype == BF16 else "grad"
    numbers: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def parameters(copy: bool) -> list[torch.nn.Parameter]:
        parameters_ = [torch.nn.Parameter(p.clone() if copy else p) for p in start]
        for p, g in zip(parameters_, grads, strict=True):
            setattr(p, attribute, g)
        return parameters_

    timings, note, result_gap = bench.timings(operation, ()), "", None
    mine = parameters(copy=True)
    eager: dict[str, Any] = dict(mode="eager")
    timings.add(Case("ours", "step", AdamW(mine, **numbers, **ours).step, **eager))
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam

        other = parameters(copy=False)
        step = FusedAdam(other, **numbers, **theirs).step
        timings.add(Case("TE", "step", step, ours=False, **eager))
        result_gap = None if timings.skipped else gap(mine, other)
    except Exception as error:
        note = reason(error)
    timings.run()
    return row(timings, "TE", "step", result_gap, note, "eager")


PARTS: dict[str, Callable[[Bench, Sizes], Iterator[list[Row]]]] = {
    "router": routers,
    "rope": ropes,
    "heads": heads,
    "adam": adam,
    "mla": mla,
}
"""Parts in the order in which they run; Megatron-Core's kernels, last, autotune for longest."""
