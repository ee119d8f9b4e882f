"""Kernels `bias_grad` compile for sm_90a without a GPU; arguments are checked."""

import itertools

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.experts.bias_grad import BiasGradConfig, BiasGradKernel, bias_grad
from tests.kernels.sm90.sass import Sass

CONFIGS = [BiasGradConfig(*flags) for flags in itertools.product((False, True), repeat=4)]
CONFIGS += [BiasGradConfig(True, False, scaled, scaled, behind=True) for scaled in (False, True)]
CONFIGS += [
    BiasGradConfig(True, False, scaled, scaled, rows_format=of)
    for scaled, of in itertools.product((False, True), ("e4m3", "e5m2"))
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_machine_code(config, tmp_path):
    code = Sass(BiasGradKernel, config, tmp_path)
    code.check_no_stack()
    assert len(code.usages("REG")) == 2  # two kernels
    assert max(code.usages("REG")) <= 64  # many CTAs on an SM hide the latency of memory
    width = "128" if config.rows_format == "bf16" else "64"
    # 64 bytes at a time, and the remaining rows one by one
    assert code.count(rf"LDG\.E\.{width}") >= config.together + 1
    assert "ATOM" not in code.text and "RED." not in code.text


OFFSETS = torch.tensor([0, 4, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": torch.zeros(8, 96)}, "O=96, L=2: O must be a positive multiple of 64"),
        ({"d": torch.zeros(64)}, r"d and offsets must be \[S, O\] and \[L \+ 1\]"),
        ({"accumulate": True}, "accumulate: needs out_LO"),
        ({"dtype": torch.float16}, "out .or dtype. must be torch.bfloat16 or torch.float32"),
        ({}, "d must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_are_checked(change, message):
    given = {"d": torch.zeros(8, 64), "offsets": OFFSETS, **change}
    with pytest.raises(ValueError, match=message):
        bias_grad(**given)
