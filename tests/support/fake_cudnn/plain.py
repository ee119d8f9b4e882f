"""The wrappers without an activation: rows times weights, and weight gradients."""

import math

import torch

from tests.support.fake_cudnn.checks import BF16, defaults, operand, rows, spans


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
    """bf16: A (m, S) and B (S, n), either way around in memory; wgrad [L, m, n]."""
    m, S = a_tensor.shape
    n, L = b_tensor.shape[1], len(offsets_tensor)
    defaults(
        sfa=(sfa_tensor, None),
        sfb=(sfb_tensor, None),
        mode=(output_mode, "dense"),
        workspace=(descriptor_workspace, None),  # block-scaled alone
    )
    operand("a", a_tensor, BF16, (m, S), (1, m) if a_tensor.stride(0) == 1 else (S, 1))
    operand("b", b_tensor, BF16, (S, n), (1, S) if b_tensor.stride(0) == 1 else (n, 1))
    assert m % 8 == 0 and n % 8 == 0, "rows of whole 16 bytes"
    operand("offsets", offsets_tensor, torch.int32, (L,), align=4)
    dtype = BF16 if wgrad_dtype is None else wgrad_dtype
    assert dtype in (BF16, torch.float32)
    if wgrad_tensor is None:
        assert not accumulate_on_output
        wgrad_tensor = a_tensor.new_full((L, m, n), math.nan, dtype=dtype)
    operand("wgrad", wgrad_tensor, dtype, (L, m, n))
    for e, span in spans(offsets_tensor, S):
        dw = a_tensor[:, span].float() @ b_tensor[span].float()
        wgrad_tensor[e] = (wgrad_tensor[e].float() + dw if accumulate_on_output else dw).to(dtype)
    return dict(wgrad_tensor=wgrad_tensor)
