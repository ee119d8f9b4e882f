"""Every `wgrad` kernel compiles for sm_90a without a GPU, and its machine code is what is meant."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.sm90.gemm.mainloop import THREADS
from phalanx.kernels.sm90.gemm.persistent import SMEM_BYTES
from phalanx.kernels.sm90.wgrad.bf16 import Contraction, D, V
from phalanx.kernels.sm90.wgrad.kernel import WgradConfig, WgradKernel, choose
from phalanx.kernels.sm90.wgrad.wgrad import wgrad
from tests.kernels.sm90.sass import Sass

ALL = [
    *(
        WgradConfig(Contraction(columns), fp32_out=fp32_out)
        for columns in (128, 192, 256)
        for fp32_out in (False, True)
    ),
    *(WgradConfig(Contraction(n), True, True, ordered=True) for n in (128, 192, 256)),
    *(WgradConfig(Contraction(n, which)) for n in (128, 192, 256) for which in (D, V)),
    *(WgradConfig(Contraction(256, which), True, True) for which in (D, V)),
    *(WgradConfig(Contraction(n, V), False, True) for n in (192, 256)),
    WgradConfig(Contraction(256), fp32_out=True, zeros=False),
]
OFTEN = [
    *[
        WgradConfig(Contraction(128)),
        WgradConfig(Contraction(192), fp32_out=True),
        WgradConfig(Contraction(256), True, True, ordered=True),
    ],
    *[WgradConfig(Contraction(256, D)), WgradConfig(Contraction(192, V), False, True)],
    *ALL[-2:],
]
CONFIGS = [
    pytest.param(config, marks=() if config in OFTEN else pytest.mark.slow, id=str(config))
    for config in ALL
]


class Code(Sass):
    """The machine code of a configuration."""

    def __init__(self, config: WgradConfig, folder: Path) -> None:
        super().__init__(WgradKernel, config, folder)
        self.config = config


def _registers(code: str) -> int:
    return 1 + max(int(r) for r in re.findall(r"\bR(\d+)\b", code))


@pytest.fixture(scope="module", params=CONFIGS)
def code(request, tmp_path_factory) -> Iterator[Code]:
    return Code(request.param, tmp_path_factory.mktemp("cubin"))


def test_multiplies_with_wgmma(code):
    shape = rf"HGMMA\.64x{code.config.math.columns}x16\.F32\.BF16"
    assert code.count(shape) == 8  # the first stage, and the loop over the others
    assert code.count(r"HGMMA.*\.tnspA\.tnspB") == code.count("HGMMA") == 8
    assert code.count("WARPGROUP.DEPBAR") == 2  # one wait a stage, one a tile: not serialised


def test_loads_boxes_or_rows(code):
    gathered, boxes = code.config.math.gathered, code.config.math.boxes
    by_tma = [boxes[which] for which in (D, V) if which != gathered]
    assert code.count(r"UTMALDG\.2D") == 2 * sum(by_tma)
    # a whole stage, and one that ends an expert, in each half of a tile: 4 rows a thread
    copies = 0 if gathered is None else 2 * 4 * sum(boxes)
    assert code.count(r"LDGSTS\S*\.128") == copies
    assert "ATOMG" in code.text


def test_stores_or_adds_by_tma(code):
    blocks = code.config.math.columns // code.config.output.block
    assert code.count(r"UTMAREDG\.3D\.ADD") == (blocks if code.config.add else 0)
    assert code.count(r"UTMASTG\.3D") == (
        0 if code.config.add else (1 + code.config.zeros) * blocks
    )
    assert "RED.E" not in code.text


def test_no_fence_waits_for_the_whole_gpu(code):
    assert "MEMBAR.ALL.GPU" not in code.text


def test_nothing_spills(code):
    code.check_no_stack()
    assert max(code.usages("REG")) * THREADS <= 65536


def test_registers_fit_their_warp_groups(code):
    _, rest = re.split(r"USETMAXREG\.DEALLOC", code.text, maxsplit=1)
    load, math = re.split(r"USETMAXREG\.TRY_ALLOC", rest, maxsplit=1)
    limits = code.config.contraction.registers
    assert _registers(load) <= limits[0]
    assert _registers(math) <= limits[1]
    assert 128 * limits[0] + 256 * limits[1] <= 65536


def test_shared_memory_fits(code):
    loop, output = code.config.contraction, code.config.output
    assert loop.stages >= 4
    assert loop.stages * loop.stage_bytes + output.bytes + 2048 <= SMEM_BYTES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": 100}, "columns=100: tiles have 128, 192 or 256"),
        ({"columns": 256, "gathered": 2}, "gathered=2"),
    ],
)
def test_impossible_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Contraction(**options)


def test_chosen_tile_wastes_least():
    assert [choose(i) for i in (7168, 2880, 2048, 768, 64)] == [256, 192, 256, 256, 192]


INTS = dict(offsets=torch.tensor([0, 4, 8], dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": Operand(torch.zeros(8, 96))}, "d has 96 channels in 1 part.s., each of which must"),
        ({"v": Operand(torch.zeros(64))}, r"d and v must be matrices and offsets \[L \+ 1\]"),
        ({"offsets": torch.zeros(1)}, "offsets must be .* at least one expert"),
        (dict.fromkeys("dv", Operand(torch.zeros(8, 64), gather=True)), "gather at most one"),
        ({"index_S": INTS["offsets"]}, "index_S: give it if an operand is gathered"),
        ({"accumulate": True}, "accumulate: needs out_LOI"),
        ({"dtype": torch.float16}, "out .or dtype. must be torch.bfloat16 or torch.float32"),
        ({"tile": 100}, "columns=100"),
        ({}, "d must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_are_checked(change, message):
    given = {"d": Operand(torch.zeros(8, 64)), "v": Operand(torch.zeros(8, 64)), **INTS, **change}
    with pytest.raises(ValueError, match=message):
        wgrad(**given)
