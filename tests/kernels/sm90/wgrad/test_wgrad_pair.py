"""Kernels of `wgrad_pair` compile for sm_90a without a GPU, and their machine code is as meant."""

import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.calls import ExpertRows, Operand
from phalanx.kernels.quantize.blocks import QuantizedColumns
from phalanx.kernels.sm90.gemm.mainloop import THREADS
from phalanx.kernels.sm90.jit.shipped import SHIPPED
from phalanx.kernels.sm90.wgrad.bf16 import Contraction, D, V
from phalanx.kernels.sm90.wgrad.fp8 import Fp8Contraction
from phalanx.kernels.sm90.wgrad.kernel import WgradConfig, WgradPairKernel
from phalanx.kernels.sm90.wgrad.wgrad import wgrad_pair
from tests.kernels.sm90.sass import Sass

ALL = [config for kernel, config in SHIPPED if kernel is WgradPairKernel]
OFTEN = [
    WgradConfig(Contraction(256, D), True, True, ordered=True),
    WgradConfig(Contraction(192, V), True, False, ordered=True),
    WgradConfig(Fp8Contraction(256), True, True, ordered=True),
]
CONFIGS = [
    pytest.param(config, marks=() if config in OFTEN else pytest.mark.slow, id=str(config))
    for config in ALL
]


class Code(Sass):
    """The machine code of a configuration."""

    def __init__(self, config: WgradConfig, folder) -> None:
        super().__init__(WgradPairKernel, config, folder)
        self.config = config


@pytest.fixture(scope="module", params=CONFIGS)
def code(request, tmp_path_factory) -> Iterator[Code]:
    return Code(request.param, tmp_path_factory.mktemp("cubin"))


def test_what_is_often_compiled_is_shipped():
    assert set(OFTEN) <= set(ALL)


def test_multiplies_with_wgmma(code):
    """Without a wait in between: a segment adds to what the one before it has left."""
    if isinstance(code.config.math, Fp8Contraction):
        assert code.count(r"QGMMA\.64x\d+x32\.F32") == code.count("GMMA") > 0
        return
    shape = rf"HGMMA\.64x{code.config.math.columns}x16\.F32\.BF16"
    assert code.count(shape) == code.count("HGMMA") == 2 * 8  # the first stage, and the others
    assert code.count("WARPGROUP.DEPBAR") == 2 * 2
    # the first product of the second segment adds, unless an expert has no rows in the first one
    assert len(re.findall(r"HGMMA.*, R\d+, U?P\d ", code.text)) == 1


def test_stores_once(code):
    blocks = code.config.math.columns // code.config.output.block
    zeros = 0 if code.config.add else blocks  # of experts without rows
    assert code.count(r"UTMAREDG\.3D\.ADD") == (blocks if code.config.add else 0)
    assert code.count(r"UTMASTG\.3D") == (0 if code.config.add else blocks + zeros)


def test_registers_and_memory_fit(code):
    code.check_no_stack()
    assert max(code.usages("REG")) * THREADS <= 65536
    _, rest = re.split(r"USETMAXREG\.DEALLOC", code.text, maxsplit=1)
    sides = re.split(r"USETMAXREG\.TRY_ALLOC", rest, maxsplit=1)
    for side, limit in zip(sides, code.config.contraction.registers, strict=True):
        assert 1 + max(int(r) for r in re.findall(r"\bR(\d+)\b", side)) <= limit


def rows(S=8, O=64, I=128, L=2, **changes) -> ExpertRows:  # noqa: E741
    d, v = Operand(torch.zeros(S, O)), Operand(torch.zeros(S, I))
    given = ExpertRows(d, v, torch.zeros(L + 1, dtype=torch.int32))
    return given._replace(**changes)


def columns(channels: int, dtype: torch.dtype) -> Operand:
    data_CT, scale = torch.zeros(channels, 128).to(dtype), torch.ones(1, 1)
    return Operand(QuantizedColumns(data_CT, scale))


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
IN_FP8 = dict(d=columns(64, E4M3), v=columns(128, E4M3))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (rows(), rows(O=128), "must have the same channels and format"),
        (rows(), rows(I=64), "must have the same channels and format"),
        (rows(), rows(L=3), "must have the same experts"),
        (rows(), rows(**IN_FP8), "must have the same channels and format"),
        (
            rows(**IN_FP8),
            rows(**IN_FP8 | dict(d=columns(64, E5M2))),
            "must have the same channels and format",
        ),
        (
            rows(),
            rows(d=Operand(torch.zeros(8, 64), gather=True), index_S=torch.zeros(8)),
            "must have the same channels and format",
        ),
        (rows(O=96), rows(O=96), "d has 96 channels"),
        (rows(), rows(), "d must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_are_checked(first, second, message):
    with pytest.raises(ValueError, match=message):
        wgrad_pair(first, second, torch.zeros(2, 64, 128))
