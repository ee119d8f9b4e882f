"""The wrappers without an activation: rows times weights, and weight gradients."""

import math

import torch

from tests.support.fake_cudnn.checks import BF16, defaults, operand, rows, spans
from tests.support.fake_cudnn.glu import outputs
from tests.support.fake_cudnn.scaled import family, read, read_columns


def grouped_gemm_wrapper_sm100(
    a_tensor,
    padded_offsets,
    alpha_tensor,
    b_tensor=None,
    bias_tensor=None,
    b_ptrs=None,
    n=None,
    b_dtype=None,
    b_major="k",
    prob_tensor=None,
    acc_dtype=None,
    c_dtype=None,
    d_dtype=None,
    c_tensor=None,
    d_tensor=None,
    cd_major="n",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    vector_f32=False,
    m_aligned=256,
    generate_c=False,
    use_dynamic_sched=False,
    current_stream=None,
):
    """bf16: A [S, k], B [L, n, k] or n-major [L, k, n]; prob multiplies the bias alone."""
    S, k, L = rows(a_tensor, padded_offsets)
    n_out = b_tensor.shape[2 if b_major == "n" else 1]
    operand("a", a_tensor, BF16, (S, k))
    operand("b", b_tensor, BF16, (L, k, n_out) if b_major == "n" else (L, n_out, k))
    operand("alpha", alpha_tensor, torch.float32, (L,))
    operand("prob", prob_tensor, torch.float32, (S,))
    if bias_tensor is not None:
        operand("bias", bias_tensor, BF16, (n_out, L), (1, n_out))
    d = a_tensor.new_full((S, n_out), math.nan)
    for e, span in spans(padded_offsets, S):
        w = b_tensor[e].float()
        y = a_tensor[span].float() @ (w if b_major == "n" else w.T) * alpha_tensor[e]
        if bias_tensor is not None:
            y = y + bias_tensor[:, e].float() * prob_tensor[span, None]
        d[span] = y.to(BF16)
    return dict(d_tensor=d, c_tensor=None)


def grouped_gemm_quant_wrapper_sm100(
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
    row_scale_tensor=None,
    acc_dtype=None,
    d_dtype=None,
    d_tensor=None,
    cd_major="n",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=16,
    sf_fp8_dtype_override=None,
    vector_f32=False,
    m_aligned=256,
    discrete_col_sfd=False,
    use_dynamic_sched=False,
    use_single_group_runtime_offsets=False,
    current_stream=None,
    *,
    generate_amax=True,
    scheduler_counter_tensor=None,
):
    """Block-scaled: A [S, k], B [L, n, k]; prob multiplies the bias, or the product without one."""
    own = family(a_tensor, sf_vec_size)
    S, k, L = rows(a_tensor, padded_offsets)
    k, n_out = k * own.wide, b_tensor.shape[1]
    assert own.scale is not None and b_major == "k" and not generate_amax
    assert not outputs(own, None, d_dtype, norm_const_tensor, discrete_col_sfd)
    a = read("a", a_tensor, sfa_tensor, (S, k), own)
    b = read("b", b_tensor, sfb_tensor, (L, n_out, k), own)
    operand("alpha", alpha_tensor, torch.float32, (L,))
    prob = torch.ones(S)
    if prob_tensor is not None:
        prob = operand("prob", prob_tensor, torch.float32, (S,))
    if bias_tensor is not None:
        operand("bias", bias_tensor, BF16, (n_out, L), (1, n_out))
    d = torch.full((S, n_out), math.nan)
    for e, span in spans(padded_offsets, S):
        y = a[span] @ b[e].T * alpha_tensor[e]
        factor = prob[span, None]
        d[span] = y * factor if bias_tensor is None else y + bias_tensor[:, e].float() * factor
    missing = ("d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor")
    return dict(d_tensor=d.to(BF16)) | dict.fromkeys(missing)


def grouped_gemm_wgrad_wrapper_sm100(
    a_tensor,
    b_tensor,
    sfa_tensor,
    sfb_tensor,
    offsets_tensor,
    output_mode="dense",
    wgrad_tensor=None,
    wgrad_ptrs=None,
    global_scale_a=None,
    global_scale_b=None,
    acc_dtype=None,
    wgrad_dtype=None,
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=16,
    sf_fp8_dtype_override=None,
    accumulate_on_output=False,
    input_order="tensor2d",
    current_stream=None,
    *,
    descriptor_workspace=None,
):
    """A (m, S) and B (S, n), either way around in memory but for fp4; wgrad [L, m, n]."""
    own = family(a_tensor, sf_vec_size)
    m, units = a_tensor.shape
    S, n, L = units * own.wide, b_tensor.shape[1], len(offsets_tensor)
    defaults(mode=(output_mode, "dense"), workspace=(descriptor_workspace, None))
    along = (units, 1), (1, units)  # over tokens
    if own.wide == 1:
        along = (1, m) if a_tensor.stride(0) == 1 else along[0], along[1]
        along = along[0], (n, 1) if b_tensor.stride(0) != 1 else along[1]
    operand("a", a_tensor, own.data, (m, units), along[0])
    operand("b", b_tensor, own.data, (units, n), along[1])
    if own.scale is None:
        assert sfa_tensor is None and sfb_tensor is None
        a, b = a_tensor.float(), b_tensor.float()
    else:
        a = read_columns("a", a_tensor, sfa_tensor, offsets_tensor, m, own)
        b = read_columns("b", b_tensor.T, sfb_tensor, offsets_tensor, n, own).T
    factor = torch.ones(L)
    if own.wide == 2:
        for scale in (global_scale_a, global_scale_b):
            factor = factor * operand("global scale", scale, torch.float32, (L,), align=4)
    else:
        assert global_scale_a is None and global_scale_b is None
    assert m % 8 == 0 and n % 8 == 0, "rows of whole 16 bytes"
    operand("offsets", offsets_tensor, torch.int32, (L,), align=4)
    dtype = BF16 if wgrad_dtype is None else wgrad_dtype
    assert dtype in (BF16, torch.float32)
    if wgrad_tensor is None:
        assert not accumulate_on_output
        wgrad_tensor = torch.full((L, m, n), math.nan, dtype=dtype)
    operand("wgrad", wgrad_tensor, dtype, (L, m, n))
    for e, span in spans(offsets_tensor, S):
        dw = a[:, span] @ b[span] * factor[e]
        wgrad_tensor[e] = (wgrad_tensor[e].float() + dw if accumulate_on_output else dw).to(dtype)
    return dict(wgrad_tensor=wgrad_tensor)
