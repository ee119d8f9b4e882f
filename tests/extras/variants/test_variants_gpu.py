"""Variants on one Hopper GPU: fused kernels are the torch backend, graphs are eager steps."""

from pathlib import Path

import pytest

from tests.end_to_end.test_train_gpu import _hopper, check_fused_and_captured

pytestmark = pytest.mark.gpu

__all__ = ["_hopper"]


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_fused_and_captured_steps(optim: str, tmp_path: Path) -> None:
    common = ["model=tiny", "model.moe.shared_ffn=64", "model.variants=[latent:64]"]
    common += [f"optim={optim}", "run.steps=20", "parallel.capacity_factor=8"]
    check_fused_and_captured(tmp_path, common, same=("loss", "grad_norm", "load_max"))
