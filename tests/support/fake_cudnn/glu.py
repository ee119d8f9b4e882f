"""The wrappers with a gated epilogue: forward, and the backward pass through it."""

import math

import torch
from torch import Tensor

from tests.support.fake_cudnn.checks import BF16, apart, defaults, operand, rows, spans
from tests.support.fake_cudnn.scaled import FP8, family, quantized, read

RUN = 32


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and linear half of channels interleaved in runs of 32."""
    gate, up = h.unflatten(-1, (-1, 2, RUN)).unbind(-2)
    return gate.flatten(-2), up.flatten(-2)


def runs(gate: Tensor, up: Tensor) -> Tensor:
    """Inverse of `halves`."""
    pair = (gate.unflatten(-1, (-1, RUN)), up.unflatten(-1, (-1, RUN)))
    return torch.stack(pair, -2).flatten(-3)


def grouped_gemm_glu_wrapper_sm100(
    a_tensor,
    sfa_tensor,
    padded_offsets,
    alpha_tensor,
    b_tensor=None,
    sfb_tensor=None,
    bias_tensor=None,
    b_ptrs=None,
    sfb_ptrs=None,
    n=None,
    b_dtype=None,
    b_major="k",
    norm_const_tensor=None,
    prob_tensor=None,
    acc_dtype=None,
    c_dtype=None,
    d_dtype=None,
    cd_major="n",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=16,
    vector_f32=False,
    m_aligned=256,
    discrete_col_sfd=False,
    act_func="swiglu",
    linear_offset=None,
    geglu_alpha=1.702,
    glu_clamp_max=7.0,
    glu_clamp_min=-7.0,
    situ_beta1=4.0,
    situ_beta2=25.0,
    use_dynamic_sched=False,
    use_single_group_runtime_offsets=False,
    current_stream=None,
    generate_c=False,
    sf_fp8_dtype_override=None,
    *,
    scheduler_counter_tensor=None,
):
    """A [S, k], B [L, n, k], bias (n, l) with strides (1, n), prob [S]."""
    own = family(a_tensor, sf_vec_size)
    S, k, L = rows(a_tensor, padded_offsets)
    k, n_full = k * own.wide, b_tensor.shape[1]
    assert n_full > 0 and n_full % 64 == 0 and b_major == "k"
    defaults(counter=(scheduler_counter_tensor, None))
    makes = outputs(own, c_dtype, d_dtype, norm_const_tensor, discrete_col_sfd)
    if own.scale is None:
        defaults(
            geglu_alpha=(geglu_alpha, 1.702),
            clamps=((glu_clamp_min, glu_clamp_max), (-7.0, 7.0)),
        )
    a = read("a", a_tensor, sfa_tensor, (S, k), own)
    b = read("b", b_tensor, sfb_tensor, (L, n_full, k), own)
    operand("alpha", alpha_tensor, torch.float32, (L,))
    operand("prob", prob_tensor, torch.float32, (S,))
    if bias_tensor is not None:
        operand("bias", bias_tensor, BF16, (n_full, L), (1, n_full))
    offset = (1.0 if act_func == "geglu" else 0.0) if linear_offset is None else linear_offset
    c = torch.full((S, n_full), math.nan, dtype=BF16)
    d = torch.full((S, n_full // 2), math.nan)
    for e, span in spans(padded_offsets, S):
        h = a[span] @ b[e].T * alpha_tensor[e]
        if bias_tensor is not None:
            h = h + bias_tensor[:, e].float()
        c[span] = h.to(BF16)
        gate, up = halves(h)
        if act_func == "geglu":
            gate = gate.clamp(max=glu_clamp_max)
            up = up.clamp(glu_clamp_min, glu_clamp_max)
            value = gate * torch.sigmoid(geglu_alpha * gate) * (up + offset)
        else:
            assert act_func == "swiglu"
            value = gate * torch.sigmoid(gate) * up
        d[span] = value * prob_tensor[span, None]
    c = c if generate_c or own.scale is not None else None
    return dict(c_tensor=c, **made("d_tensor", d, own, makes, padded_offsets, (L, 1)))


def outputs(own, c_dtype, d_dtype, norm_const, discrete_col_sfd) -> bool:
    """True if an epilogue quantizes its output."""
    assert c_dtype in (None, BF16) and d_dtype in (None, BF16, FP8)
    if d_dtype == FP8:
        assert own.data == FP8 and discrete_col_sfd
        assert operand("norm_const", norm_const, torch.float32, (1,)).item() == 1
        return True
    defaults(norm_const=(norm_const, None), discrete_col_sfd=(discrete_col_sfd, False))
    return False


def made(name, d, own, quantizes, offsets, amax_shape):
    """The outputs of an epilogue that computed d in fp32."""
    missing = dict.fromkeys(("d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"))
    if quantizes:
        q = quantized(d, offsets)
        found = dict(d_col_tensor=q.col, sfd_row_tensor=q.sfd_row, sfd_col_tensor=q.sfd_col)
        return {name: q.row} | missing | found
    if own.scale is not None:  # whose amax nobody reads
        missing["amax_tensor"] = torch.full(amax_shape, math.nan)
        missing["d_col_tensor"] = torch.full_like(d, math.nan, dtype=BF16)
    if own.data == FP8:  # allocated all the same
        q = quantized(torch.zeros_like(d), offsets)
        missing |= dict(sfd_row_tensor=q.sfd_row, sfd_col_tensor=q.sfd_col)
    return {name: d.to(BF16)} | missing


def grouped_gemm_dglu_wrapper_sm100(
    a_tensor,
    c_tensor,
    sfa_tensor,
    padded_offsets,
    alpha_tensor,
    beta_tensor,
    prob_tensor,
    dprob_tensor,
    b_tensor=None,
    sfb_tensor=None,
    generate_dbias=False,
    b_ptrs=None,
    sfb_ptrs=None,
    n=None,
    b_dtype=None,
    b_major="k",
    norm_const_tensor=None,
    acc_dtype=None,
    d_dtype=None,
    cd_major="n",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=16,
    sf_fp8_dtype_override=None,
    vector_f32=False,
    m_aligned=256,
    discrete_col_sfd=False,
    act_func="dswiglu",
    linear_offset=None,
    geglu_alpha=1.702,
    glu_clamp_max=7.0,
    glu_clamp_min=-7.0,
    situ_beta1=4.0,
    situ_beta2=25.0,
    epilogue_op=None,
    use_dynamic_sched=False,
    use_single_group_runtime_offsets=False,
    current_stream=None,
    round_dgrad_to_input_dtype=False,
    activation_tensor=None,
    deterministic=False,
):
    """A [S, k], C [S, 2 n], B [L, n, k] or in bf16 n-major [L, k, n], prob and dprob [S]."""
    own = family(a_tensor, sf_vec_size)
    S, k, L = rows(a_tensor, padded_offsets)
    k, n_out = k * own.wide, c_tensor.shape[1] // 2
    assert n_out > 0 and n_out % 32 == 0
    defaults(dbias=(generate_dbias, False), round_dgrad=(round_dgrad_to_input_dtype, False))
    assert act_func in ("dswiglu", "dgeglu")
    makes = outputs(own, None, d_dtype, norm_const_tensor, discrete_col_sfd)
    if own.scale is None:
        assert not deterministic, "block-scaled alone"
    else:
        assert b_major == "k" and activation_tensor is None, "bf16 alone"
        assert makes or own.data != FP8, "of e4m3 an output in e4m3"
    a = read("a", a_tensor, sfa_tensor, (S, k), own)
    shape = (L, k, n_out) if b_major == "n" else (L, n_out, k)
    b = read("b", b_tensor, sfb_tensor, shape, own)
    operand("c", c_tensor, BF16, (S, 2 * n_out))
    for name, factor in (("alpha", alpha_tensor), ("beta", beta_tensor)):
        operand(name, factor, torch.float32, (L,))
    operand("prob", prob_tensor, torch.float32, (S,))
    assert not operand("dprob", dprob_tensor, torch.float32, (S,)).any(), "dprob is added to"
    geglu = act_func == "dgeglu"
    if activation_tensor is not None:
        assert geglu, "activations are an output of dgeglu alone"
        operand("activation", activation_tensor, BF16, (S, n_out), align=32)
        apart("activation", activation_tensor, a_tensor, b_tensor, c_tensor, dprob_tensor)
        activation_tensor.fill_(math.nan)
    if geglu:
        assert 0 < geglu_alpha < math.inf
        assert -math.inf < glu_clamp_min < glu_clamp_max < math.inf
    offset = (1.0 if geglu else 0.0) if linear_offset is None else linear_offset
    alpha_in = geglu_alpha if geglu else 1.0
    low, high = (glu_clamp_min, glu_clamp_max) if geglu else (-math.inf, math.inf)
    d = torch.full((S, 2 * n_out), math.nan)
    for e, span in spans(padded_offsets, S):
        dy = a[span] @ (b[e] if b_major == "n" else b[e].T) * alpha_tensor[e] ** 2
        x1, x2 = halves(c_tensor[span].float() * beta_tensor[e])
        gate, up = x1.clamp(max=high), x2.clamp(low, high)
        sigmoid, prob = torch.sigmoid(alpha_in * gate), prob_tensor[span, None]
        slope = sigmoid * (1 + alpha_in * gate * (1 - sigmoid))
        dgate = dy * prob * slope * (up + offset)
        dup = dy * prob * gate * sigmoid
        d[span] = runs(
            torch.where(x1 <= high, dgate, 0.0),
            torch.where((low <= x2) & (x2 <= high), dup, 0.0),
        )
        value = gate * sigmoid * (up + offset)
        dprob_tensor[span] += (dy * value).sum(1)
        if activation_tensor is not None:
            activation_tensor[span] = (value * prob).to(BF16)
    found = made("d_row_tensor", d, own, makes, padded_offsets, (L, 2, 1))
    found |= dict(dprob_tensor=dprob_tensor, dbias_tensor=None)
    if activation_tensor is not None:
        found["activation_tensor"] = activation_tensor
    return found
