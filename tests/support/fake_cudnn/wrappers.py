"""The five wrappers, of arguments `g` without `_tensor` in their names; see `_PARAMETERS`.

Legend: S expert rows, k channels in, n channels out, L experts.
"""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.fake_cudnn.checks import BF16, apart, defaults, operand, rows, spans
from tests.support.fake_cudnn.scaled import FP8, Family, family, quantized, read, read_columns

RUN = 32
_INF = math.inf
_MISSING = dict.fromkeys(("d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"))


class Product:
    """Rows times weights of their experts: the operands, checked, and the loop over experts.

    A [S, k], B [L, n, k] or n-major [L, k, n], alpha [L], bias (n, L) with strides (1, n), prob
    [S].
    """

    def __init__(self, g: SimpleNamespace, n: int, *, bias: Tensor | None = None) -> None:
        self.own = own = family(g.a, getattr(g, "sf_vec_size", 16))
        self.S, k, self.L = rows(g.a, g.padded_offsets)
        k *= own.wide
        self.g, self.bias, self.transposed = g, bias, g.b_major == "n"
        self.a = read("a", g.a, getattr(g, "sfa", None), (self.S, k), own)
        shape = (self.L, k, n) if self.transposed else (self.L, n, k)
        self.b = read("b", g.b, getattr(g, "sfb", None), shape, own)
        operand("alpha", g.alpha, torch.float32, (self.L,))
        if g.prob is not None:
            operand("prob", g.prob, torch.float32, (self.S,))
        if bias is not None:
            operand("bias", bias, BF16, (n, self.L), (1, n))

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor | float, Tensor]]:
        """Rows of each expert, their product in fp32, its bias and its alpha."""
        for e, span in spans(self.g.padded_offsets, self.S):
            w = self.b[e] if self.transposed else self.b[e].T
            bias = 0.0 if self.bias is None else self.bias[:, e].float()
            yield span, self.a[span] @ w * self.g.alpha[e], bias, self.g.alpha[e]


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and linear half of channels interleaved in runs of 32."""
    gate, up = h.unflatten(-1, (-1, 2, RUN)).unbind(-2)
    return gate.flatten(-2), up.flatten(-2)


def runs(gate: Tensor, up: Tensor) -> Tensor:
    """Inverse of `halves`."""
    pair = (gate.unflatten(-1, (-1, RUN)), up.unflatten(-1, (-1, RUN)))
    return torch.stack(pair, -2).flatten(-3)


def glu(g: SimpleNamespace) -> dict[str, Any]:
    """A gated activation of the product and its bias, times prob."""
    n_full = g.b.shape[1]
    assert n_full > 0 and n_full % 64 == 0 and g.b_major == "k" and g.prob is not None
    defaults(counter=(g.scheduler_counter, None))
    product = Product(g, n_full, bias=g.bias)
    own, makes = product.own, quantizes(product.own, g, g.c_dtype)
    assert g.act_func in ("swiglu", "geglu")
    if own.scale is None:
        clamps = (g.glu_clamp_min, g.glu_clamp_max), (-7.0, 7.0)
        defaults(geglu_alpha=(g.geglu_alpha, 1.702), clamps=clamps)
    alpha, low, high, offset = constants(g, "geglu")
    c = torch.full((product.S, n_full), math.nan, dtype=BF16)
    d = torch.full((product.S, n_full // 2), math.nan)
    for span, y, bias, _ in product:
        h = y + bias
        c[span] = h.to(BF16)
        gate, up = halves(h)
        gate, up = gate.clamp(max=high), up.clamp(low, high)
        d[span] = gate * torch.sigmoid(alpha * gate) * (up + offset) * g.prob[span, None]
    c = c if g.generate_c or own.scale is not None else None
    return dict(c_tensor=c, **made("d_tensor", d, own, makes, g, (product.L, 1)))


def dglu(g: SimpleNamespace) -> dict[str, Any]:
    """Gradients of h and prob of `glu`, whose h is C [S, 2 n]; with `activation` its result."""
    n = g.c.shape[1] // 2
    assert n > 0 and n % 32 == 0 and g.prob is not None
    defaults(dbias=(g.generate_dbias, False), round_dgrad=(g.round_dgrad_to_input_dtype, False))
    assert g.act_func in ("dswiglu", "dgeglu")
    product = Product(g, n)
    own, makes, S = product.own, quantizes(product.own, g), product.S
    if own.scale is None:
        assert not g.deterministic, "block-scaled alone"
    else:
        assert g.b_major == "k" and g.activation is None, "bf16 alone"
        assert makes or own.data != FP8, "of e4m3 an output in e4m3"
    operand("c", g.c, BF16, (S, 2 * n))
    operand("beta", g.beta, torch.float32, (product.L,))
    assert not operand("dprob", g.dprob, torch.float32, (S,)).any(), "dprob is added to"
    if g.activation is not None:
        assert g.act_func == "dgeglu", "activations are an output of dgeglu alone"
        operand("activation", g.activation, BF16, (S, n), align=32)
        apart("activation", g.activation, g.a, g.b, g.c, g.dprob)
        g.activation.fill_(math.nan)
    alpha, low, high, offset = constants(g, "dgeglu")
    assert 0 < alpha < _INF and low < high
    assert g.act_func == "dswiglu" or math.isfinite(high - low)
    d = torch.full((S, 2 * n), math.nan)
    for e, (span, y, _, of_expert) in enumerate(product):
        dy = y * of_expert  # alpha a second time
        x1, x2 = halves(g.c[span].float() * g.beta[e])
        gate, up = x1.clamp(max=high), x2.clamp(low, high)
        sigmoid, prob = torch.sigmoid(alpha * gate), g.prob[span, None]
        slope = sigmoid * (1 + alpha * gate * (1 - sigmoid))
        dgate = torch.where(x1 <= high, dy * prob * slope * (up + offset), 0.0)
        dup = torch.where((low <= x2) & (x2 <= high), dy * prob * gate * sigmoid, 0.0)
        d[span] = runs(dgate, dup)
        value = gate * sigmoid * (up + offset)
        g.dprob[span] += (dy * value).sum(1)
        if g.activation is not None:
            g.activation[span] = (value * prob).to(BF16)
    found = made("d_row_tensor", d, own, makes, g, (product.L, 2, 1))
    found |= dict(dprob_tensor=g.dprob, dbias_tensor=None)
    return found if g.activation is None else {**found, "activation_tensor": g.activation}


def constants(g: SimpleNamespace, geglu: str) -> tuple[float, float, float, float]:
    """Alpha, limits and offset of the activation; SwiGLU has none."""
    if g.act_func != geglu:
        return 1.0, -_INF, _INF, g.linear_offset or 0.0 if geglu == "dgeglu" else 0.0
    offset = 1.0 if g.linear_offset is None else g.linear_offset
    return g.geglu_alpha, g.glu_clamp_min, g.glu_clamp_max, offset


def quantizes(own: Family, g: SimpleNamespace, c_dtype: torch.dtype | None = None) -> bool:
    """True if an epilogue quantizes its output."""
    assert c_dtype in (None, BF16) and g.d_dtype in (None, BF16, FP8)
    if g.d_dtype == FP8:
        assert own.data == FP8 and g.discrete_col_sfd
        assert operand("norm_const", g.norm_const, torch.float32, (1,)).item() == 1
        return True
    defaults(norm_const=(g.norm_const, None), discrete_col_sfd=(g.discrete_col_sfd, False))
    return False


def made(
    name: str, d: Tensor, own: Family, makes: bool, g: SimpleNamespace, amax: tuple[int, ...]
) -> dict[str, Any]:
    """The outputs of an epilogue that computed d in fp32."""
    missing: dict[str, Any] = dict(_MISSING)
    if makes:
        q = quantized(d, g.padded_offsets)
        found = dict(d_col_tensor=q.col, sfd_row_tensor=q.sfd_row, sfd_col_tensor=q.sfd_col)
        return {name: q.row} | missing | found
    if own.scale is not None:  # whose amax nobody reads
        missing["amax_tensor"] = torch.full(amax, math.nan)
        missing["d_col_tensor"] = torch.full_like(d, math.nan, dtype=BF16)
    if own.data == FP8:  # allocated all the same
        q = quantized(torch.zeros_like(d), g.padded_offsets)
        missing |= dict(sfd_row_tensor=q.sfd_row, sfd_col_tensor=q.sfd_col)
    return {name: d.to(BF16)} | missing


def plain(g: SimpleNamespace) -> dict[str, Any]:
    """The product in bf16; prob multiplies the bias alone."""
    assert g.prob is not None
    product = Product(g, g.b.shape[2 if g.b_major == "n" else 1], bias=g.bias)
    assert product.own.scale is None
    d = torch.full((product.S, product.b.shape[2 if g.b_major == "n" else 1]), math.nan)
    for span, y, bias, _ in product:
        d[span] = y + bias * g.prob[span, None]
    return dict(d_tensor=d.to(BF16), c_tensor=None)


def quant(g: SimpleNamespace) -> dict[str, Any]:
    """The block-scaled product; prob multiplies the bias, or the product without one."""
    product = Product(g, g.b.shape[1], bias=g.bias)
    assert product.own.scale is not None and g.b_major == "k" and not g.generate_amax
    assert not quantizes(product.own, g)
    prob = torch.ones(product.S) if g.prob is None else g.prob
    d = torch.full((product.S, g.b.shape[1]), math.nan)
    for span, y, bias, _ in product:
        factor = prob[span, None]
        d[span] = y * factor if g.bias is None else y + bias * factor
    return dict(d_tensor=d.to(BF16)) | _MISSING


def wgrad(g: SimpleNamespace) -> dict[str, Any]:
    """A (m, S) and B (S, n), either way around in memory but for fp4; wgrad [L, m, n]."""
    own = family(g.a, g.sf_vec_size)
    m, units = g.a.shape
    S, n, L = units * own.wide, g.b.shape[1], len(g.offsets)
    defaults(mode=(g.output_mode, "dense"), workspace=(g.descriptor_workspace, None))
    along = (units, 1), (1, units)  # over tokens
    if own.wide == 1:
        along = (1, m) if g.a.stride(0) == 1 else along[0], along[1]
        along = along[0], (n, 1) if g.b.stride(0) != 1 else along[1]
    operand("a", g.a, own.data, (m, units), along[0])
    operand("b", g.b, own.data, (units, n), along[1])
    if own.scale is None:
        assert g.sfa is None and g.sfb is None
        a, b = g.a.float(), g.b.float()
    else:
        a = read_columns("a", g.a, g.sfa, g.offsets, m, own)
        b = read_columns("b", g.b.T, g.sfb, g.offsets, n, own).T
    factor, scales = torch.ones(L), (g.global_scale_a, g.global_scale_b)
    if own.wide == 2:
        for scale in scales:
            factor = factor * operand("global scale", scale, torch.float32, (L,), align=4)
    else:
        assert scales == (None, None)
    assert m % 8 == 0 and n % 8 == 0, "rows of whole 16 bytes"
    operand("offsets", g.offsets, torch.int32, (L,), align=4)
    dtype = BF16 if g.wgrad_dtype is None else g.wgrad_dtype
    assert dtype in (BF16, torch.float32)
    out = g.wgrad
    if out is None:
        assert not g.accumulate_on_output
        out = torch.full((L, m, n), math.nan, dtype=dtype)
    operand("wgrad", out, dtype, (L, m, n))
    for e, span in spans(g.offsets, S):
        dw = a[:, span] @ b[span] * factor[e]
        out[e] = (out[e].float() + dw if g.accumulate_on_output else dw).to(dtype)
    return dict(wgrad_tensor=out)
