"""Operands quantized to MXFP8 or NVFP4 and dequantized, on a CPU or a GPU.

The values of `extras.microscaling.mxfp8` and `extras.microscaling.nvfp4`, bit for bit, in the
dtype of the operand: bf16 has all of them but its denormal numbers and overflows. Those of NVFP4
are e2m1 * scale; the sum of a product remains to be multiplied by the fp32 scale of each expert's
tensor (`nvfp4.tensor_scale`). Triton kernels on CUDA, the definition itself elsewhere. Nothing is
read on the host.

Legend: S expert rows, C channels, L experts, O and I channels out and in, T rows of columns.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from phalanx.extras.microscaling import mxfp8, nvfp4
from phalanx.kernels.quantize import blocks

type Format = Literal["mxfp8", "nvfp4"]


class Values(NamedTuple):
    """An operand that was quantized and dequantized."""

    matrix: Tensor
    amax_L: Tensor | None  # fp32 largest magnitude of each expert's tensor; None for MXFP8


@torch.no_grad()
def rows(
    x_SC: Tensor, offsets: Tensor, form: Format, parts: int = 1, *, stochastic: bool = False
) -> Values:
    """Expert rows that are contracted over their channels.

    Args:
        x_SC: bf16 or fp32, contiguous; rows from offsets[L] on are undefined in the result.
        offsets: int32 [L + 1], first row of each expert.
        form: MXFP8 or NVFP4.
        parts: equal ranges of C whose borders no block crosses.
        stochastic: round NVFP4 stochastically.
    """
    if x_SC.is_cuda:
        from phalanx.extras.microscaling import emulate_gpu

        return Values(*emulate_gpu.rows(x_SC, offsets, form, parts, stochastic=stochastic))
    if form == "mxfp8":
        return Values(mxfp8.dequantize(mxfp8.quantize(x_SC, parts), parts).to(x_SC.dtype), None)
    q = nvfp4.quantize_rows(x_SC, offsets, parts, stochastic=stochastic)
    return Values(nvfp4.values_of_rows(q, parts).to(x_SC.dtype), q.amax)


@torch.no_grad()
def columns(x_SC: Tensor, offsets: Tensor, form: Format, *, stochastic: bool = False) -> Values:
    """Expert rows [T, C] that are contracted over tokens, at `column_offsets`.

    Args:
        x_SC, offsets, form, stochastic: as for `rows`.
    """
    if x_SC.is_cuda:
        from phalanx.extras.microscaling import emulate_gpu

        return Values(*emulate_gpu.columns(x_SC, offsets, form, stochastic=stochastic))
    if form == "mxfp8":
        values_CT = mxfp8.dequantize(mxfp8.quantize_columns(x_SC, offsets))
        return Values(values_CT.T.to(x_SC.dtype).contiguous(), None)
    q = nvfp4.quantize_columns(x_SC, offsets, stochastic=stochastic)
    return Values(nvfp4.values_of_rows(q).T.to(x_SC.dtype).contiguous(), q.amax)


def column_offsets(offsets: Tensor, form: Format) -> Tensor:
    """int32 [L + 1]: offset of each expert's rows in `columns`."""
    return blocks.column_offsets(offsets, {"mxfp8": mxfp8, "nvfp4": nvfp4}[form].BLOCK)


@torch.no_grad()
def weights(w_LOI: Tensor, form: Format, parts: int = 1, parts_in: int = 1) -> Values:
    """Weights that are contracted over I.

    Args:
        w_LOI: bf16 or fp32, contiguous or the transpose of a contiguous tensor.
        form: MXFP8 or NVFP4.
        parts: equal ranges of O whose borders no block crosses.
        parts_in: the same for I.
    """
    if w_LOI.is_cuda:
        from phalanx.extras.microscaling import emulate_gpu

        return Values(*emulate_gpu.weights(w_LOI, form, parts, parts_in))
    if form == "mxfp8":
        q = mxfp8.quantize(w_LOI, parts_in)
        return Values(mxfp8.dequantize(q, parts_in).to(w_LOI.dtype), None)
    q4 = nvfp4.quantize_weights(w_LOI, parts, parts_in)
    return Values(nvfp4.values_of_weights(q4, parts, parts_in).to(w_LOI.dtype), q4.amax)
