"""<dy[n], b2[e]> of all rows and experts against fp64, and its code in an interpreter."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.kernels.quantize.quantize import (
    dequantize_rows,
    empty_rows,
    quantize_rows,
    row_bytes,
    unpack_rows,
)
from tests.kernels.interpreter import interpret

SHAPES = [(130, 5, 96), (1, 66, 64), (0, 3, 32)]
"""Rows, experts, channels."""


def drawn(rows: int, experts: int, channels: int, device: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    made = (torch.randn(n, channels, generator=g) for n in (rows, experts))
    dy, b2 = (t.to(device, torch.bfloat16) for t in made)
    return dy, b2


def check(rows: int, experts: int, channels: int, device: str) -> None:
    """Near the sum; on a GPU an expert's bits do not depend on how many there are beside it."""
    from phalanx.kernels.sm90.experts.bias_products_triton import bias_products

    dy, b2 = drawn(rows, experts, channels, device)
    found = bias_products(dy, b2)
    want, size = (a.double() @ b.double().T for a, b in ((dy, b2), (dy.abs(), b2.abs())))
    assert found.dtype == torch.float32
    assert bool(((found.double() - want).abs() <= channels * 2.0**-24 * size).all())
    beside = () if device == "cpu" else (slice(0, 1), slice(experts // 2, experts))
    for some in beside:
        assert torch.equal(bias_products(dy, b2[some].contiguous()), found[:, some])
    check_fp8(dy, b2)


def check_fp8(dy: Tensor, b2: Tensor) -> None:
    """Rows in FP8, also with scales behind each row, have the bits of their values in bf16."""
    from phalanx.kernels.sm90.experts.bias_products_triton import bias_products

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        q = quantize_rows(dy, dtype=dtype)
        want = bias_products(dequantize_rows(q), b2)
        assert torch.equal(bias_products(q, b2), want)
        room = torch.zeros(len(dy), row_bytes(dy.shape[1]), dtype=torch.uint8, device=dy.device)
        packed = unpack_rows(room, dy.shape[1], dtype)
        packed.data.view(torch.uint8).copy_(q.data.view(torch.uint8))
        packed.scale.copy_(q.scale)
        assert torch.equal(bias_products(packed, b2), want)


def refused() -> None:
    """The kernel would read other numbers."""
    from phalanx.kernels.sm90.experts.bias_products_triton import bias_products

    dy, b2 = drawn(8, 3, 32, "cpu")
    for given, name in (
        ((dy.T.contiguous().T, b2), "dy"),
        ((dy, b2.repeat(1, 2)[:, ::2]), "b2"),
        ((dy.float(), b2), "dy"),
        ((dy, b2.float()), "b2"),
        ((dy, b2[:, :16].contiguous()), "b2"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be contiguous bf16 with 32 channels"):
            bias_products(*given)


def interpreted() -> None:
    for shape in SHAPES:
        check(*shape, "cpu")
    refused()


def test_in_an_interpreter() -> None:
    interpret(__name__)


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", [(130, 5, 96), (4096, 34, 2880)])
def test_the_kernel_compiles_for_hopper(
    shape: tuple[int, int, int], quantized: bool, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.sm90.experts import bias_products_triton
    from tests.kernels.triton_code import launched

    rows, experts, channels = shape
    dy, b2 = (
        torch.empty(n, channels, dtype=torch.bfloat16, device="meta") for n in (rows, experts)
    )

    matrix = empty_rows(rows, channels, device=dy.device) if quantized else dy

    def call() -> None:
        bias_products_triton.bias_products(matrix, b2)

    code = launched(bias_products_triton, "bias_products_kernel", call, tmp_path)
    assert code.stack == 0 and code.count("HGMMA")
