"""NVFP4: the definition in plain torch, on any device.

e2m1 in blocks of 16 elements along the contraction, or of 16 x 16 of weights, with e4m3 scales, and
one fp32 scale for a tensor; an expert's rows and an expert's weights are a tensor each. Scales and
bits are those of Transformer Engine 2.20's NVFP4BlockScaling
(pytorch/custom_recipes/reference_nvfp4.py, common/cast/nvfp4); the recipe is that of arXiv
2509.25149. With amax of the tensor, S = 448 * 6 / amax:

    scale of a block    e4m3(its amax * S / 6)
    element             e2m1(x / (scale / S))
    its value           e2m1 * scale * amax / (448 * 6)

e2m1 * scale has six significant bits and is exact in bf16; amax / (448 * 6) multiplies the sum of a
product. A NaN or an infinity spreads to its whole tensor through amax.

Both operands of a weight gradient, whose contraction runs over tokens, are rotated before they are
quantized: 16 tokens at a time by a Hadamard matrix with fixed signs, which cancels in the product.

Gradients may be rounded stochastically. A tensor's key is a checksum of its bits, and the random
bits of an element a hash of key and index. There is no generator and no state: the same tensor is
rounded the same way in a resumed run, in the replay of a CUDA graph, on a CPU and on a GPU; another
tensor, of another step, layer or micro-batch, in another way. All is in 32-bit integers, whose sums
do not depend on order.

Legend: S expert rows, C channels, L experts, O and I channels out and in, T rows of S with every
expert's padded to full blocks; B_X is X in blocks of BLOCK, the last of which may be short. `parts`
are equal ranges of channels, whose borders no block crosses.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.quantize.blocks import (
    column_offsets,
    join_parts,
    padded,
    split_parts,
    spread,
    tile_amax,
)

GOLDEN = 0x9E3779B1
MURMUR = (0x85EBCA6B, 0xC2B2AE35)
"""Odd multipliers: 2^32 over the golden ratio, and those of MurmurHash3's finalizer."""


def keys(x_SC: Tensor, group_S: Tensor, element_SC: Tensor, groups: int) -> Tensor:
    """int32 [groups]: checksums of the fp32 rows of each group; later ids are of none."""
    bits = x_SC.contiguous().view(torch.int32)
    bits = bits ^ _shifted(bits, 16)  # bf16 has nothing in the low half
    sums_S = (bits * (_wrapped(element_SC, GOLDEN) | 1)).sum(1, dtype=torch.int64)
    total = torch.zeros(groups + 1, dtype=torch.int64, device=x_SC.device)
    return low(total.index_add_(0, group_S.clamp(max=groups), sums_S)[:groups])


def elements(row_S: Tensor, channels: int) -> Tensor:
    """int32 [S, C]: index of each element in its expert's tensor, from its row there."""
    channel_C = torch.arange(channels, dtype=torch.int64, device=row_S.device)
    return low(row_S.long()[:, None] * channels + channel_C)


def uniform(key: Tensor, element: Tensor) -> Tensor:
    """fp32 multiples of 2^-24 in [0, 1); key and element are int32 and broadcast."""
    h = _wrapped(element, GOLDEN) + key
    for shift, factor in zip((16, 13), MURMUR, strict=True):
        h = _wrapped(h ^ _shifted(h, shift), factor)
    return _shifted(h ^ _shifted(h, 16), 8).float() * 2**-24


def _wrapped(x: Tensor, factor: int) -> Tensor:
    return x * (factor - (1 << 32))


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (32 - by)) - 1)


def low(x: Tensor) -> Tensor:
    """int64 -> int32 of the lower half."""
    half = x & 0xFFFFFFFF
    return torch.where(half < 1 << 31, half, half - (1 << 32)).int()


BLOCK = 16  # elements of a side of a block, and tokens that are rotated together

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of a block's tokens in the rotation, the same as Transformer Engine's."""

TOP = 448.0 * 6.0  # the largest e4m3 times the largest e2m1

LARGEST = torch.finfo(torch.float32).max


class NVFP4(NamedTuple):
    """A matrix of each expert, whose last dimension is contracted."""

    code: Tensor
    """uint8, an e2m1 each: sign, two bits of exponent, one of mantissa. `packed` has two a byte."""
    scale: Tensor  # e4m3, of each block
    amax: Tensor
    """fp32 [L]: the largest magnitude of each expert's tensor; of columns after the rotation."""


def quantize_rows(
    x_SC: Tensor, offsets: Tensor, parts: int = 1, *, stochastic: bool = False
) -> NVFP4:
    """Expert rows in blocks of 16 channels: code [S, C], scale [S, parts * B_C/parts].

    Args:
        x_SC: bf16 or fp32; rows from offsets[L] on are not read, and become 0.
        offsets: int32 [L + 1], first row of each expert.
        stochastic: round elements stochastically, without bias.
    """
    x, expert_S, row_S = _of_experts(x_SC, offsets)
    L, C = len(offsets) - 1, x.shape[1]
    amax_L = expert_amax(x, expert_S, L)
    random = None
    if stochastic:
        element = elements(row_S, C)
        key_L = keys(x, expert_S, element, L)
        random = split_parts(uniform(key_L[expert_S.clamp(max=L - 1)][:, None], element), parts)
    amax_S = amax_L[expert_S.clamp(max=L - 1)][:, None]
    code, scale = _quantize(split_parts(x, parts), amax_S, (1, BLOCK), random)
    return NVFP4(join_parts(code), join_parts(scale), amax_L)


def quantize_columns(
    x_SC: Tensor, offsets: Tensor, align: int = BLOCK, *, stochastic: bool = False
) -> NVFP4:
    """Rotated expert rows for a contraction over tokens: code [C, T], scale [C, T / BLOCK].

    An expert's tokens start at multiples of `align`, which is one of BLOCK. Rows of 0 that pad a
    block take part in its rotation. See `quantize_rows`.
    """
    x_TC = rotate(padded(x_SC, offsets, align)).float()
    starts, L = column_offsets(offsets, align), len(offsets) - 1
    x_TC, expert_T, row_T = _of_experts(x_TC, starts)
    amax_L = expert_amax(x_TC, expert_T, L)
    random = None
    if stochastic:
        element = elements(row_T, x_TC.shape[1])
        key_L = keys(x_TC, expert_T, element, L)
        random = uniform(key_L[expert_T.clamp(max=L - 1)][:, None], element).T
    amax_B = amax_L[expert_T[::BLOCK].clamp(max=L - 1)]
    return NVFP4(*_quantize(x_TC.T, amax_B, (1, BLOCK), random), amax_L)


def quantize_weights(w_LOI: Tensor, parts: int = 1, parts_in: int = 1) -> NVFP4:
    """Weights in blocks of 16 x 16: code [L, O, I], scale [L, parts * B_O/.., parts_in * B_I/..].

    The transpose has the same codes and scales.
    """
    L = len(w_LOI)
    w = w_LOI.float()
    amax_L = _amax_of(w.abs().flatten(1)) if w.numel() else w.new_zeros(L)
    tiled = _matrices(w, parts, parts_in)
    code, scale = _quantize(tiled, amax_L[:, None, None, None, None], (BLOCK, BLOCK), None)
    return NVFP4(_from_matrices(code), _from_matrices(scale), amax_L)


def values_of_rows(q: NVFP4, parts: int = 1) -> Tensor:
    """fp32 e2m1 * scale of rows, or of columns [C, T]; to be multiplied by `tensor_scale`."""
    code = split_parts(q.code, parts)
    return join_parts(
        e2m1_value(code) * spread(split_parts(q.scale, parts).float(), code, (1, BLOCK))
    )


def values_of_weights(q: NVFP4, parts: int = 1, parts_in: int = 1) -> Tensor:
    """fp32 e2m1 * scale [L, O, I], to be multiplied by `tensor_scale`."""
    code, scale = (_matrices(t, parts, parts_in) for t in (q.code, q.scale))
    return _from_matrices(e2m1_value(code) * spread(scale.float(), code, (BLOCK, BLOCK)))


def tensor_scale(*amax: Tensor) -> Tensor:
    """fp32 factor on the sum of a product of matrices with these amax."""
    # A multiplication, because GPUs compile a division by a constant to one, but CPUs do not.
    return torch.stack(amax).prod(0) * (1 / TOP ** len(amax))


def rotate(x_TC: Tensor) -> Tensor:
    """bf16: 16 rows at a time, y = H diag(SIGNS) x / 4 with Sylvester's Hadamard matrix H.

    In fp32 and four stages, each of which adds and subtracts the rows whose numbers differ in one
    bit, the lowest first; rounded once. T is a multiple of 16.
    """
    groups = x_TC.float().unflatten(0, (-1, BLOCK))
    rows = [row * sign for row, sign in zip(groups.unbind(1), SIGNS, strict=True)]
    for bit in (1, 2, 4, 8):
        rows = [
            rows[i ^ bit] - rows[i] if i & bit else rows[i] + rows[i ^ bit] for i in range(BLOCK)
        ]
    # Adding zero turns -0 into 0.
    return (torch.stack(rows, 1) * 0.25 + 0.0).flatten(0, 1).to(torch.bfloat16)


def encode_scale(amax: Tensor) -> Tensor:
    """S, fp32; of an amax of 0 or infinity 1."""
    scale = (torch.full_like(amax, TOP) / amax).clamp(max=LARGEST)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def e2m1(x: Tensor) -> Tensor:
    """uint8: rounded to nearest even, saturated at 6; 0 for NaN."""
    v = x.abs()
    code = (v > 0.25).to(torch.uint8)
    for bound, upwards in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        code += v >= bound if upwards else v > bound
    code += v > 5
    return torch.where(x.isnan(), 0, code | x.signbit().to(torch.uint8) << 3)


def e2m1_stochastic(x: Tensor, random: Tensor) -> Tensor:
    """uint8: rounded stochastically without bias; `random` is uniform in [0, 1)."""
    v = x.abs().clamp(max=6)
    step = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0))
    below = (v / step).floor() * step
    return e2m1((below + torch.where(v - below > random * step, step, 0.0)).copysign(x))


def e2m1_value(code: Tensor) -> Tensor:
    """fp32."""
    bits = code.int()
    mantissa, exponent = bits & 1, bits >> 1 & 3
    magnitude = torch.where(exponent > 0, (2 + mantissa) << exponent, 2 * mantissa) * 0.25
    return torch.where(bits & 8 > 0, -magnitude, magnitude)


def packed(code: Tensor) -> Tensor:
    """uint8 [..., ceil(C / 2)]: two elements per byte, the even one in the low four bits."""
    code = torch.nn.functional.pad(code, (0, code.shape[-1] % 2))
    return code[..., ::2] | code[..., 1::2] << 4


def expert_amax(x_SC: Tensor, expert_S: Tensor, experts: int) -> Tensor:
    """fp32 [L]: the largest magnitude of each expert's rows, with NaN as the largest of all.

    `expert_S` is int64; L and more for rows without an expert.
    """
    rows_S = _amax_of(x_SC.abs()) if x_SC.numel() else x_SC.new_zeros(len(x_SC))
    bits = torch.zeros(experts + 1, dtype=torch.int32, device=x_SC.device)
    index = expert_S.clamp(max=experts)
    bits.scatter_reduce_(0, index, rows_S.view(torch.int32), "amax")
    return bits[:experts].view(torch.float32)


def _amax_of(magnitude: Tensor) -> Tensor:
    """Maximum over the last dimension, by bits, whose order has NaN as the largest."""
    return magnitude.contiguous().view(torch.int32).amax(-1).view(torch.float32)


def _of_experts(x_SC: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 rows (0 from offsets[L] on), the expert of each (L there), and its index there."""
    L = len(offsets) - 1
    row = torch.arange(len(x_SC), dtype=torch.int32, device=x_SC.device)
    expert_S = torch.searchsorted(offsets[1:], row, right=True)
    row_S = row - offsets[expert_S.clamp(max=L)]
    return torch.where((expert_S < L)[:, None], x_SC.float(), 0.0), expert_S, row_S


def _quantize(
    x: Tensor, amax: Tensor, tile: tuple[int, int], random: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes [..., R, C] and e4m3 of each tile; amax of the tensor broadcasts to tiles."""
    S = encode_scale(amax)
    bits = x.abs().contiguous().view(torch.int32)
    largest = tile_amax(bits, tile).view(torch.float32)
    # As Transformer Engine's kernels multiply: by a sixth of S.
    scale = (largest * (S * (1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
    decode = scale.float() * S.reciprocal()
    encode = decode.reciprocal().clamp(max=LARGEST)
    y = (x * spread(encode, x, tile)).clamp(-6, 6)
    return e2m1(y) if random is None else e2m1_stochastic(y, random), scale


def _matrices(w_LOI: Tensor, parts: int, parts_in: int) -> Tensor:
    """[L, O, I] -> [L, parts, parts_in, O / parts, I / parts_in]."""
    return w_LOI.unflatten(1, (parts, -1)).unflatten(3, (parts_in, -1)).transpose(2, 3)


def _from_matrices(w: Tensor) -> Tensor:
    return w.transpose(2, 3).flatten(3).flatten(1, 2)
