"""The recipes of a run, and what all recipes have alike."""

import pytest

from phalanx.configs.formats import described
from phalanx.configs.load import load
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.quantize.recipe import Microscaling
from phalanx.moe.model.kernel_facts import recipe
from tests.kernels.expert_mlp import test_recipes as alike

FORMATS = pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])


def test_recipes_of_blackwell() -> None:
    assert recipe(load(["precision=mxfp8"]), 0) == Microscaling("mxfp8")
    cfg = load(["precision=nvfp4", "precision.wgrad=bf16", "precision.stochastic_rounding=false"])
    assert recipe(cfg, 0) == Microscaling("nvfp4", wgrad="bf16", stochastic=False)
    assert described(cfg) == "nvfp4 (wgrad bf16, stochastic_rounding False)"
    cfg.precision.bf16_last_layers = 1
    assert [recipe(cfg, i) is not None for i in range(4)] == [True, True, True, False]


@FORMATS
@pytest.mark.parametrize(
    "test",
    [
        alike.test_padding_reaches_nothing,
        alike.test_no_rows_and_no_tokens,
        alike.test_the_same_bits_twice_and_with_more_padding,
        alike.test_gradients_added_to_main_grad,
    ],
)
def test_as_in_other_recipes(test, name):
    test(Microscaling(name))


@FORMATS
@pytest.mark.parametrize("act", [alike.SWIGLU, Activation("squared_relu")], ids=lambda a: a.kind)
def test_halves_of_a_dense_mlp_are_the_whole_bit_for_bit(act, name):
    alike.test_halves_of_a_dense_mlp_are_the_whole_bit_for_bit(act, Microscaling(name))
