"""Operations that a library has too: ours and the library's on the same data.

`scripts.bench.comparison` runs and measures them; a library is imported when its side is made.

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
from phalanx.scripts.bench.comparison import Operation, Row, both_ms, compare, gap, note_of
from phalanx.scripts.bench.measure import Bench, reason

BF16, FP32 = torch.bfloat16, torch.float32
NOPE, ROTARY, VALUE = 128, 64, 128
"""Channels of a latent head in every published model: of its own, shared, and of its value."""
MLA_HEADS = {"DeepSeek-V3": 128, "Moonlight": 16}
ROUTERS = {
    "DeepSeek-V3": (
        256,
        8,
        RouterConfig(score="sigmoid", groups=8, group_topk=4, scale=2.5, bias_rate=1e-3),
    ),
    "Qwen3": (128, 8, RouterConfig(score="softmax")),
    "GPT-OSS": (32, 4, RouterConfig(score="softmax", softmax_over="topk")),
}
"""Experts, experts per token, options."""
Makers = tuple[Callable[[], Operation], Callable[[], Operation]]
"""What makes our side and the library's."""


class Heads(NamedTuple):
    """Of grouped-query attention."""

    queries: int
    keys: int
    channels: int
    biased: bool
    """The projection has a bias."""


ROPE_HEADS = {"Qwen3": Heads(32, 4, 128, False), "GPT-OSS": Heads(64, 8, 64, True)}


class Sizes(NamedTuple):
    """How large the comparisons are."""

    positions: int = 4096
    batches: tuple[int, ...] = (1, 4)
    parameters: int = 1 << 30
    tensors: int = 64
    """That the parameters are in."""


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    g = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=g, device=device, dtype=FP32).to(dtype)


def angles(positions: int, channels: int, device: torch.device) -> Tensor:
    """fp32 [S, 1, 1, channels], both halves the same."""
    rate = 10000 ** (-torch.arange(0, channels, 2, device=device, dtype=FP32) / channels)
    turns = torch.arange(positions, device=device, dtype=FP32)[:, None] * rate
    return torch.cat([turns, turns], -1)[:, None, None]


def _own(*tensors: Tensor) -> list[Tensor]:
    """Copies to differentiate by."""
    return [t.clone().requires_grad_() for t in tensors]


def mla(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Rotary embedding of latent attention, against Megatron-Core's fused kernels for it.

    Both turn queries in place; those take cosines and sines in bf16, as Megatron-Core passes them.
    """
    for model, H in MLA_HEADS.items():
        for B in sizes.batches:
            shape, at = (sizes.positions, B, H), f"{model}, {sizes.positions} x {B}"
            for what, sides in (("queries", _queries), ("keys and values", _keys_values)):
                made = sides(*shape, device=bench.clock.device)
                yield compare(bench, f"MLA {what}, {at}", "Megatron-Core", *made)
                del made
                bench.clock.free()


def _queries(S: int, B: int, H: int, *, device: torch.device) -> Makers:
    freqs = angles(S, ROTARY, device)
    q, dq = (drawn(S, B, H, NOPE + ROTARY, device=device, seed=seed) for seed in (1, 2))

    def ours() -> Operation:
        (x,) = _own(q)
        how: dict[str, Any] = dict(heads=H, interleaved=True, first=NOPE)
        return Operation(lambda: [rope_(_Made.apply(x), freqs, **how)], [x], [dq.clone()])

    def theirs() -> Operation:
        from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

        (x,), cos, sin = _own(q), freqs.cos().to(BF16), freqs.sin().to(BF16)
        turn = fused.fused_apply_mla_rope_for_q
        return Operation(lambda: [turn(x, cos, sin, NOPE, ROTARY)], [x], [dq.clone()])

    return ours, theirs


class _Made(torch.autograd.Function):
    """Of heads [S, B, H, d], what may be written to, [S, B, H * d], without a copy: queries come
    out of a projection.
    """

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
        x, part = own = _own(kv, shared)
        return Operation(lambda: keys_values(x, part, freqs, nope=NOPE), own, grads)

    def theirs() -> Operation:
        from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

        x, part = own = _own(kv, shared)
        angle, parts = (freqs.cos().to(BF16), freqs.sin().to(BF16)), (ROTARY, NOPE, VALUE)
        join = fused.fused_apply_mla_rope_for_kv
        return Operation(lambda: join(x, part[:, :, None], *angle, *parts), own, grads)

    return ours, theirs


def routers(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Choice and weights of a router, against Transformer Engine's dense map and its indices."""
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
        (x,), K = _own(self.logits), self.dprob.shape[1]
        return Operation(
            lambda: [fused_topk.topk(x, self.bias, self.options, K)[1]], [x], [self.dprob]
        )

    def theirs(self, indices: bool) -> Operation:
        from transformer_engine.pytorch.router import fused_topk_with_score_function as fused

        (x,), K, o = _own(self.logits), self.dprob.shape[1], self.options
        limited = o.group_topk < o.groups
        given: dict[str, Any] = dict(
            topk=K,
            use_pre_softmax=False,
            num_groups=o.groups if limited else None,
            group_topk=o.group_topk if limited else None,
            scaling_factor=o.scale,
            score_function=o.score,
            expert_bias=self.bias,
        )
        if indices:
            given["topk_indices"] = torch.empty(len(x), K, dtype=torch.int32, device=x.device)
        with torch.no_grad():
            idx = fused_topk.topk(self.logits, self.bias, o, K)[0].long()
        dense = torch.zeros_like(self.logits).scatter_(1, idx, self.dprob)
        return Operation(lambda: [fused(x, **given)[0]], [x], [dense], lambda p: p.gather(1, idx))


def ropes(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Rotary embedding of a mixed projection plus its bias, against Transformer Engine's."""
    for model, heads in ROPE_HEADS.items():
        for B in sizes.batches:
            S, bias = sizes.positions, " with bias" if heads.biased else ""
            made = _mixed(S, B, heads, device=bench.clock.device)
            yield compare(bench, f"rope, {model}{bias}, {S} x {B}", "TE", *made)
            del made
            bench.clock.free()


def _mixed(S: int, B: int, heads: Heads, *, device: torch.device) -> Makers:
    H, G, d, biased = heads
    N, freqs = H // G + 2, angles(S, d, device)
    mixed = [drawn(S, B, G, N, d, device=device, seed=9)]
    mixed += [drawn(G, N, d, device=device, seed=10)] if biased else []
    grads = [drawn(S, B, n, d, device=device, seed=11) for n in (H, G, G)]

    def ours() -> Operation:
        x, *bias = own = _own(*mixed)
        return Operation(
            lambda: queries_keys_values(x, bias[0] if bias else None, freqs), own, grads
        )

    def theirs() -> Operation:
        from transformer_engine.pytorch.attention import rope as library

        x, *bias = own = _own(*mixed)
        fused, parts = library.apply_fused_qkv_rotary_pos_emb, [(N - 2) * d, d, d]

        def forward() -> Sequence[Tensor]:
            qkv = (x + bias[0] if bias else x).flatten(3)
            return fused(qkv, freqs, freqs, parts)  # type: ignore[no-any-return]

        return Operation(forward, own, grads)

    return ours, theirs


def heads(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """The same with norms of query and key heads, against Transformer Engine's norms and rotation,
    as Megatron-Core calls them."""
    shape = ROPE_HEADS["Qwen3"]
    for B in sizes.batches:
        S = sizes.positions
        made = _normed(S, B, shape, device=bench.clock.device)
        yield compare(bench, f"norms and rope, Qwen3, {S} x {B}", "TE", *made)
        del made
        bench.clock.free()


def _normed(S: int, B: int, heads: Heads, *, device: torch.device) -> Makers:
    H, G, d, _ = heads
    N, freqs, eps = H // G + 2, angles(S, d, device), 1e-6
    weights = [1 + drawn(1, d, device=device, seed=seed)[0] / 8 for seed in (12, 13)]
    given = [drawn(S, B, G, N, d, device=device, seed=9), *weights]
    grads = [drawn(S, B, n, d, device=device, seed=n) for n in (H, G, G)]

    def ours() -> Operation:
        x, *scales = own = _own(*given)
        norms = HeadNorms(*scales, eps)
        return Operation(lambda: queries_keys_values(x, None, freqs, norms=norms), own, grads)

    def theirs() -> Operation:
        import transformer_engine.pytorch as te

        x, *scales = own = _own(*given)
        norms = [te.RMSNorm(d, eps=eps, dtype=BF16, device=device) for _ in scales]
        for norm, scale in zip(norms, scales, strict=True):
            norm.weight = torch.nn.Parameter(scale.detach())
        own = [x, *(norm.weight for norm in norms)]

        def forward() -> Sequence[Tensor]:
            from transformer_engine.pytorch.attention import rope as library

            q, k, v = x.split([N - 2, 1, 1], -2)
            parts = [q.flatten(2, 3), k.squeeze(-2)]
            turned = [
                library.apply_rotary_pos_emb(norm(part), freqs, tensor_format="sbhd", fused=True)
                for norm, part in zip(norms, parts, strict=True)
            ]
            return *turned, v.squeeze(-2).contiguous()

        return Operation(forward, own, grads)

    return ours, theirs


def adam(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """A step of the optimizer, against FusedAdam, from the same parameters and gradients."""
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

    def parameters(copy: bool) -> list[Tensor]:
        made = [torch.nn.Parameter(p.clone() if copy else p) for p in start]
        for p, g in zip(made, grads, strict=True):
            setattr(p, attribute, g)
        return made

    sides, note, apart = bench.sides(operation, ()), "", None
    mine = parameters(copy=True)
    sides.add("ours", "step", AdamW(mine, **numbers, **ours).step, modes=("eager",))
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam

        other = parameters(copy=False)
        step = FusedAdam(other, **numbers, **theirs).step
        sides.add("TE", "step", step, modes=("eager",), ours=False)
        apart = None if sides.lost else gap(mine, other)
    except Exception as error:
        note = reason(error)
    sides.run()
    ms = both_ms(sides, "TE", "step", "eager")
    return Row(operation, "TE", "step", *ms, apart, note_of(sides, note))


PARTS: dict[str, Callable[[Bench, Sizes], Iterator[list[Row]]]] = {
    "router": routers,
    "rope": ropes,
    "heads": heads,
    "adam": adam,
    "mla": mla,
}
"""In the order in which they run: Megatron-Core's kernels tune themselves for longest."""
