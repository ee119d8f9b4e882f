"""Rates of another width on one Hopper GPU: a captured update has the rates of its groups."""

from pathlib import Path

import pytest

from tests.end_to_end.test_train_gpu import GRAPH, _hopper, close, train_side_by_side

pytestmark = pytest.mark.gpu

__all__ = ["_hopper"]


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_fused_and_captured_steps(optim: str, tmp_path: Path) -> None:
    common = ["model=tiny", "model.moe.shared_ffn=64", "model.variants=[mup:32]"]
    common += [f"optim={optim}", "run.steps=20", "parallel.capacity_factor=8"]
    fused = [*common, "kernels=fused"]
    runs = {"torch": [*common, "kernels=torch"], "eager": fused, "graph": [*fused, GRAPH]}
    theirs, eager, graph = train_side_by_side(tmp_path, runs).values()
    close(eager[:4], theirs[:4])
    assert eager[-1]["loss"] < eager[0]["loss"]
    for name in ("loss", "grad_norm", "lr"):
        assert [s[name] for s in graph] == [s[name] for s in eager], name
    assert "could not be captured" not in (tmp_path / "graph" / "console.log").read_text()
