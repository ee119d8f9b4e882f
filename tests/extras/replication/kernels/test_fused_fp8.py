"""Replicas in the fused backend in FP8, on stand-ins."""

import sys

import pytest
import torch

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.sm90.fp8 import transpose_overlap
from tests.extras.replication.kernels.replicas import compare
from tests.kernels.problems import make, random_choice
from tests.kernels.sm90.fp8.test_backend import (
    RECIPES,
    copies_made,
    grouped_gemm,
    stand_ins,  # noqa: F401 - a fixture
)


@pytest.mark.parametrize("act", [Activation("swiglu"), Activation("squared_relu")], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_replicas_have_the_bits_of_own_experts(
    recipe: Fp8Block, bias: bool, act: Activation
) -> None:
    choice = random_choice(200, 2, [0, 1, 3, 5])
    p = make(act, torch.bfloat16, bias=bias, choice=choice, L=6, D=192, width=160, rows=420)
    order = torch.tensor([5, 1, 0, 4, 3, 2], dtype=torch.int32)
    compare(p, 4, MLPSpec(act, "fused", accumulate=True, recipe=recipe), order=order)


def test_gemms_of_replicas_leave_sms_to_transposes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlapped(gemm, flops, transposes, moved_bytes, device):
        made = gemm(8)
        for transpose in transposes:
            transpose()
        return made

    def recorded(*given, options, **how):
        margins.append(options.sm_margin)
        return grouped_gemm(*given, options=options, **how)

    margins: list[int] = []
    module = sys.modules["phalanx.kernels.sm90.experts.grouped_gemm"]
    monkeypatch.setattr(transpose_overlap, "overlap_transposes", overlapped)
    monkeypatch.setattr(module, "grouped_gemm", recorded)
    p = make(Activation("swiglu"), torch.bfloat16, L=6, D=192, width=160)
    compare(p, 4, MLPSpec(p.act, "fused", accumulate=True, recipe=Fp8Block()))
    assert margins == [0, 0, 8, 8, 0, 8]  # forward and backward: of both, then of all in one


def test_copies_of_replicas_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are others in the next micro-batch."""
    made = copies_made(monkeypatch)
    p = make(Activation("swiglu"), torch.bfloat16, L=6, D=192, width=160)
    compare(p, 4, MLPSpec(p.act, "fused", accumulate=True, recipe=Fp8Block(), keep_fp8=True))
    assert len(made) == 2 + 4 + 2  # own experts', replicas' for each use; all experts' of the other
