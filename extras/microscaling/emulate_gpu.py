"""`extras.microscaling.emulated` by its Triton kernels, and their inputs.

The expert of a row or a block is computed on the device: the host knows nothing.

Legend: S expert rows, C channels, L experts, O and I channels out and in, T rows of columns, G
groups of rows that share blocks.
"""

import torch
from torch import Tensor

from phalanx.extras.microscaling import emulate_triton, mxfp8, nvfp4
from phalanx.extras.microscaling.emulate_triton import Scales
from phalanx.extras.microscaling.nvfp4 import low
from phalanx.kernels.quantize.blocks import column_offsets, column_rows

type ValuesAndAmax = tuple[Tensor, Tensor | None]  # amax [L] is for NVFP4


def rows(
    x_SC: Tensor, offsets: Tensor, form: str, parts: int = 1, *, stochastic: bool = False
) -> ValuesAndAmax:
    """`emulated.rows`."""
    if form == "mxfp8":
        return emulate_triton.rows(x_SC, parts, block=mxfp8.BLOCK), None
    L = len(offsets) - 1
    row_S = torch.arange(len(x_SC), dtype=torch.int32, device=x_SC.device)
    expert_S = torch.searchsorted(offsets[1:], row_S, right=True, out_int32=True)
    known_S = expert_S.clamp(max=L - 1)
    row_in_S = row_S - offsets[known_S]
    amax_and_keys = emulate_triton.amax_of_rows(x_SC, row_in_S if stochastic else None)
    amax_L, scales = _scales(*amax_and_keys, expert_S, L, stochastic)
    values_SC = emulate_triton.rows(
        x_SC, parts, block=nvfp4.BLOCK, scales=scales, expert_S=known_S, row_in_S=row_in_S
    )
    return values_SC, amax_L


def columns(x_SC: Tensor, offsets: Tensor, form: str, *, stochastic: bool = False) -> ValuesAndAmax:
    """`emulated.columns`."""
    block, L = (mxfp8 if form == "mxfp8" else nvfp4).BLOCK, len(offsets) - 1
    T = column_rows(len(x_SC), L, block)
    starts = column_offsets(offsets, block)
    row_G = torch.arange(0, T, block, dtype=torch.int32, device=x_SC.device)
    expert_G = torch.searchsorted(starts[1:], row_G, right=True, out_int32=True)
    known_G = expert_G.clamp(max=L - 1)
    place_G = row_G - starts[known_G]
    first_G = offsets[known_G] + place_G
    left_G = (offsets[known_G + 1] - first_G).clamp(0, block) * (expert_G < L)
    table_5G = torch.stack((first_G, left_G, row_G, known_G, place_G))
    values = x_SC.new_empty(T, x_SC.shape[1])
    if form == "mxfp8":
        emulate_triton.columns(x_SC, table_5G, values, block=block)
        return values, None
    amax, keys = emulate_triton.amax_of_groups(x_SC, table_5G, keyed=stochastic)
    tiles = amax.shape[1]
    expert = expert_G.repeat_interleave(tiles)
    amax_L, scales = _scales(amax.flatten(), keys.flatten(), expert, L, stochastic)
    emulate_triton.columns(x_SC, table_5G, values, block=block, scales=scales)
    return values, amax_L


def weights(w_LOI: Tensor, form: str, parts: int = 1, parts_in: int = 1) -> ValuesAndAmax:
    """`emulated.weights`."""
    if not w_LOI.is_contiguous() and form == "nvfp4":  # blocks are those of the transpose
        values, amax_L = weights(w_LOI.mT.contiguous(), form, parts_in, parts)
        return values.mT, amax_L
    L = len(w_LOI)
    if w_LOI.is_contiguous() and form == "mxfp8":
        matrix = w_LOI.flatten(0, 1)
        return emulate_triton.rows(matrix, parts_in, block=mxfp8.BLOCK).view_as(w_LOI), None
    if form == "mxfp8":
        w_LIO = w_LOI.mT.contiguous()
        matrix, values = w_LIO.flatten(0, 1), torch.empty_like(w_LIO)
        table_5G = _of_weights(w_LIO, parts_in, mxfp8.BLOCK)
        emulate_triton.columns(
            matrix, table_5G, values.view_as(matrix), block=mxfp8.BLOCK, of_weights=True
        )
        return values.mT, None
    matrix, values = w_LOI.flatten(0, 1), torch.empty_like(w_LOI)
    amax_R, _ = emulate_triton.amax_of_rows(matrix)
    expert_R = torch.arange(L, device=w_LOI.device).repeat_interleave(w_LOI.shape[1])
    amax_L, scales = _scales(amax_R, amax_R, expert_R, L, False)
    table_5G, to = _of_weights(w_LOI, parts, nvfp4.BLOCK), values.view_as(matrix)
    emulate_triton.columns(
        matrix, table_5G, to, parts_in, block=nvfp4.BLOCK, scales=scales, of_weights=True
    )
    return values, amax_L


def _of_weights(w_LOI: Tensor, parts: int, block: int) -> Tensor:
    """int32 [5, G] of `emulate_triton.columns` for blocks along O, in `parts` parts."""
    L, O, _ = w_LOI.shape  # noqa: E741
    rows_of = O // parts
    in_part = -(-rows_of // block)
    number_G = torch.arange(L * parts * in_part, dtype=torch.int32, device=w_LOI.device)
    part_G, of_part_G = number_G // in_part, number_G % in_part * block
    first_G = part_G * rows_of + of_part_G
    left_G = (rows_of - of_part_G).clamp(max=block)
    return torch.stack((first_G, left_G, first_G, part_G // parts, first_G))


def _scales(
    amax: Tensor, keys: Tensor, expert: Tensor, experts: int, stochastic: bool
) -> tuple[Tensor, Scales]:
    """fp32 amax [L] and the scales that kernels take, from bits of amax and keys of parts."""
    index, bits = expert.long(), amax.new_zeros(experts + 1)
    bits.scatter_reduce_(0, index, amax, "amax")
    amax_L, key_L = bits[:experts].view(torch.float32), None
    if stochastic:
        sums = torch.zeros(experts + 1, dtype=torch.int64, device=amax.device)
        key_L = low(sums.index_add_(0, index, keys.long())[:experts])
    S = nvfp4.encode_scale(amax_L)
    return amax_L, Scales(S * (1 / 6), S.reciprocal(), key_L)
