"""Indices are compared before they are cut to 32 bits."""

import pytest
import torch

from phalanx.kernels.elementwise.rows import as_int32

END = 5


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32, torch.int64, torch.uint64],
)
def test_what_is_outside_stays_outside(dtype: torch.dtype) -> None:
    given = [0, END - 1, END, 1 << 31, 1 << 32, (1 << 32) + 1, -1, -(1 << 31), -(1 << 32) + 1]
    limits = torch.iinfo(dtype)
    given = [*(i for i in given if limits.min <= i <= limits.max), limits.min, limits.max]
    made = as_int32(torch.tensor(given, dtype=dtype), END)
    assert made.dtype == torch.int32
    for before, after in zip(given, made.tolist(), strict=True):
        if 0 <= before < END:
            assert after == before
        else:
            assert not 0 <= after < END, before
