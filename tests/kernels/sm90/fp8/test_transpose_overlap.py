"""How SMs are shared between a GEMM and transposes."""

import pytest

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.fp8.transpose_overlap import MULTIPLIED, TRANSPOSED, share


@pytest.mark.parametrize(
    ("rows", "channels", "flops"),
    [
        (32768, 2880 * 5, 2.0 * 32768 * 5760 * 2880),
        (65536, 768 * 3 + 2048 * 2, 2.0 * 65536 * 1536 * 2048),
    ],
)
def test_both_take_about_the_same_time(rows: int, channels: int, flops: float) -> None:
    moved = 2 * rows * channels
    ours = share(moved, flops, 132)
    assert 16 <= ours <= 44
    transposes, gemm = moved / (ours * TRANSPOSED), flops / ((132 - ours) * MULTIPLIED)
    assert 0.85 < transposes / gemm <= 1


def test_long_gemms_are_left_alone() -> None:
    moved = 2 * 65536 * (2048 + 4096 + 7168 + 7168)
    assert share(moved, 2.0 * 65536 * 4096 * 7168, 132) == 0
    assert share(0, 1.0, 132) == 0


def test_the_gemm_keeps_half() -> None:
    assert share(10**12, 1.0, 132) == 66
    assert share(10**9, 0.0, 132) == 66
