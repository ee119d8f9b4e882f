"""MXFP8 and NVFP4 of the expert MLP on a GPU: against their statement, and captured."""

import pytest
import torch

from phalanx.kernels.quantize.recipe import Microscaling
from tests.extras.microscaling.test_emulated import RECIPES, statement
from tests.kernels.capture import check_replay
from tests.kernels.problems import error, forward, gradients, leaves_of, partial_blocks, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_the_format(name: str) -> None:
    """Near `torch` on a CPU, which rounds the gradient of h before quantization.

    That takes a hundredth of it to the other side of a boundary of e2m1, whose values are a third
    apart: 0.033 in the norm. Here sums of a grouped GEMM are rounded once more, before they are
    scaled, so that it is about the square root of two as much, and more where they cancel.
    """
    p, recipe = partial_blocks(bias=False), RECIPES[name]
    got, want, exact = (
        run(p.to("cuda"), "torch", recipe=recipe),
        statement(p, recipe),
        run(p, "torch"),
    )
    allowed = 6e-2 if recipe.format == "nvfp4" else 1.8e-2
    for k in want:
        assert error(got[k].cpu(), want[k]) < allowed, k
        assert error(exact[k], want[k]) > 1.5 * allowed, k


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_a_replay_has_the_bits_of_an_eager_step(form: str) -> None:
    p = partial_blocks().to("cuda")
    leaves, recipe = leaves_of(p), Microscaling(form)

    def step() -> list[torch.Tensor]:
        out = forward(p, leaves, "torch", recipe=recipe)
        return list(gradients(out, p.dout, leaves).values())

    check_replay(step, leaves["x"], leaves["x"].detach().flip(0))
