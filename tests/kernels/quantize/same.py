"""Equal bits of what is quantised; the sign of a NaN, which conversions differ in, is free."""

import numpy as np
import torch
from torch import Tensor

from tests.kernels.quantize.transformer_engine import LAST


def codes(data: Tensor) -> Tensor:
    """uint8; NaN as 0x7F. e5m2 has no infinity here."""
    code = data.contiguous().view(torch.uint8)
    nan = (code & 0x7F) > LAST[data.dtype]
    return torch.where(nan, torch.full_like(code, 0x7F), code)


def assert_same(got: Tensor, want: Tensor | np.ndarray) -> None:
    """Assert equal FP8 data or fp32 scales, including the signs of zeros."""
    if isinstance(want, np.ndarray):
        want = torch.from_numpy(want)
    assert got.shape == want.shape
    if got.dtype == torch.float32:
        assert want.dtype == torch.float32
        bits = [t.nan_to_num(nan=-1.0, posinf=torch.inf).view(torch.int32) for t in (got, want)]
    else:
        bits = [codes(t) if t.dtype != torch.uint8 else t for t in (got, want)]
    wrong = bits[0] != bits[1].to(bits[0].device)
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} differ, first at {at}: "
            f"{bits[0][at].item():#x}, not {bits[1][at].item():#x}"
        )
