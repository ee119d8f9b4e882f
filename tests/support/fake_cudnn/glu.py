"""The wrappers with a gated epilogue: forward, and the backward pass through it."""

import math

import torch
from torch import Tensor

from tests.support.fake_cudnn.checks import BF16, apart, defaults, operand, rows, spans

RUN = 32


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and linear half of channels in runs of 32."""
    gate, up = h.unflatten(-1, (-1, 2, RUN)).unbind(-2)
    return gate.flatten(-2), up.flatten(-2)


def runs(gate: Tensor, up: Tensor) -> Tensor:
    """The inverse of `halves`."""
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
    """bf16: A [S, k], B [L, n, k], bias (n, l) with strides (1, n), prob [S]."""
    S, k, L = rows(a_tensor, padded_offsets)
    n_full = b_tensor.shape[1]
    assert n_full > 0 and n_full % 64 == 0 and b_major == "k"
    defaults(
        sfa=(sfa_tensor, None),
        sfb=(sfb_tensor, None),
        norm_const=(norm_const_tensor, None),
        sf_vec_size=(sf_vec_size, 16),
        geglu_alpha=(geglu_alpha, 1.702),
        clamps=((glu_clamp_min, glu_clamp_max), (-7.0, 7.0)),
        counter=(scheduler_counter_tensor, None),
    )
    operand("a", a_tensor, BF16, (S, k))
    operand("b", b_tensor, BF16, (L, n_full, k))
    operand("alpha", alpha_tensor, torch.float32, (L,))
    operand("prob", prob_tensor, torch.float32, (S,))
    if bias_tensor is not None:
        operand("bias", bias_tensor, BF16, (n_full, L), (1, n_full))
    offset = (1.0 if act_func == "geglu" else 0.0) if linear_offset is None else linear_offset
    c = a_tensor.new_full((S, n_full), math.nan)
    d = a_tensor.new_full((S, n_full // 2), math.nan)
    for e, span in spans(padded_offsets, S):
        h = a_tensor[span].float() @ b_tensor[e].float().T * alpha_tensor[e]
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
        d[span] = (value * prob_tensor[span, None]).to(BF16)
    return dict(
        c_tensor=c if generate_c else None,
        d_tensor=d,
        d_col_tensor=None,
        amax_tensor=None,
        sfd_row_tensor=None,
        sfd_col_tensor=None,
    )


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
    """bf16: A [S, k], C [S, 2 n], B [L, k, n] (n-major) or [L, n, k], prob and dprob [S]."""
    S, k, L = rows(a_tensor, padded_offsets)
    n_out = c_tensor.shape[1] // 2
    assert n_out > 0 and n_out % 32 == 0
    defaults(
        sfa=(sfa_tensor, None),
        sfb=(sfb_tensor, None),
        dbias=(generate_dbias, False),
        deterministic=(deterministic, False),  # block-scaled alone
        round_dgrad=(round_dgrad_to_input_dtype, False),
    )
    assert act_func in ("dswiglu", "dgeglu")
    operand("a", a_tensor, BF16, (S, k))
    operand("b", b_tensor, BF16, (L, k, n_out) if b_major == "n" else (L, n_out, k))
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
    d = a_tensor.new_full((S, 2 * n_out), math.nan)
    for e, span in spans(padded_offsets, S):
        w = b_tensor[e].float()
        dy = a_tensor[span].float() @ (w if b_major == "n" else w.T) * alpha_tensor[e] ** 2
        x1, x2 = halves(c_tensor[span].float() * beta_tensor[e])
        gate, up = x1.clamp(max=high), x2.clamp(low, high)
        sigmoid, prob = torch.sigmoid(alpha_in * gate), prob_tensor[span, None]
        slope = sigmoid * (1 + alpha_in * gate * (1 - sigmoid))
        dgate = dy * prob * slope * (up + offset)
        dup = dy * prob * gate * sigmoid
        d[span] = runs(
            torch.where(x1 <= high, dgate, 0.0),
            torch.where((low <= x2) & (x2 <= high), dup, 0.0),
        ).to(BF16)
        value = gate * sigmoid * (up + offset)
        dprob_tensor[span] += (dy * value).sum(1)
        if activation_tensor is not None:
            activation_tensor[span] = (value * prob).to(BF16)
    made = dict(
        d_row_tensor=d,
        d_col_tensor=None,
        dprob_tensor=dprob_tensor,
        dbias_tensor=None,
        amax_tensor=None,
        sfd_row_tensor=None,
        sfd_col_tensor=None,
    )
    if activation_tensor is not None:
        made["activation_tensor"] = activation_tensor
    return made
