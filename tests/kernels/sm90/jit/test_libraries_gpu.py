"""Experts by compiled kernels, without the compiler: the same bits as with it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels import compiled_libraries as libraries
from phalanx.kernels.cache import Cache, folder
from phalanx.kernels.registry import KernelUnavailable
from phalanx.kernels.sm90.jit import launch
from phalanx.kernels.sm90.jit.shipped import COMPILED
from tests.kernels.sm90.without_compiler import without_compiler

pytestmark = pytest.mark.gpu

STEP = """
import sys
import torch
from phalanx.kernels.api import Activation, grouped_experts, grouped_experts_sorted

def step(recipe):
    g = torch.Generator("cuda").manual_seed(0)
    def draw(*shape):
        return (torch.randn(shape, generator=g, device="cuda") / shape[-1] ** 0.5).bfloat16()
    act = Activation("quick_geglu", limit=7.0, offset=1.0)
    weights = [draw(8, 512, 256), draw(8, 256, 256), draw(8, 512), draw(8, 256)]
    prob, idx = torch.rand(300, 8, generator=g, device="cuda").topk(3)
    leaves = [draw(300, 256), prob, *weights]
    for leaf in leaves:
        leaf.requires_grad_()
    x, results = leaves[0], []
    counts = torch.tensor([40, 0, 100, 1, 7, 33, 50, 20], device="cuda")
    for activation, args in ((act, weights), ("swiglu", weights[:2])):
        how = dict(activation=activation, backend="fused", recipe=recipe)
        with torch.no_grad():
            results += [grouped_experts(x, idx, prob, *args, **how)]
        out = grouped_experts(x, idx, prob, *args, **how)
        rows = grouped_experts_sorted(x, counts, None, *args, **how)
        loss = out.float().square().sum() + rows.float().square().sum()
        grads = torch.autograd.grad(loss, [x, prob, *args])
        results += [out.detach(), rows.detach(), *grads]
    return [result.cpu() for result in results]
"""


@pytest.mark.parametrize("recipe", [None, "fp8_block"])
def test_the_same_bits(recipe: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_PROGRAMS", {})  # those of other tests are not counted
    here: dict = {}
    exec(STEP, here)
    try:
        want = here["step"](recipe)
    except KernelUnavailable as reason:
        pytest.skip(str(reason))
    assert {*launch._PROGRAMS} <= {*COMPILED}, "wheels lack kernels"
    for kernel, config in launch._PROGRAMS:
        data = launch.build(kernel, config, Cache(folder()))
        libraries.link(data, launch.PREFIX, tmp_path / launch.library_name(kernel, config))
    code = STEP + f"torch.save(step({recipe!r}), sys.argv[2])"
    without_compiler(code, str(tmp_path), str(tmp_path / "results.pt"))
    for got, expected in zip(torch.load(tmp_path / "results.pt"), want, strict=True):
        assert torch.equal(got, expected)
