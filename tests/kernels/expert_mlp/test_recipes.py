"""The expert MLP under a recipe, as far as all recipes have to be alike."""

from dataclasses import replace

import pytest
import torch

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.dense_mlp import dense_fc1, dense_fc2
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.recipe import Fp8Block
from tests.kernels.problems import (
    SWIGLU,
    error,
    forward,
    gradients,
    leaves_of,
    make,
    one_expert,
    partial_blocks,
    run,
)

RECIPES = {"fp8": Fp8Block()}
EACH = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@EACH
def test_padding_reaches_nothing(recipe):
    p = partial_blocks()
    leaves = leaves_of(p)
    poisoned = forward(p, leaves, "torch", poison=True, recipe=recipe)
    split = gradients(poisoned, p.dout, leaves)
    assert all(t.isfinite().all() for t in split.values())
    whole = run(p, "torch", recipe=recipe)
    assert torch.equal(split["dw1"], whole["dw1"]) and torch.equal(split["dw2"], whole["dw2"])


@EACH
def test_no_rows_and_no_tokens(recipe):
    size = dict(L=2, D=168, width=136, rows=8)
    nobody = make(SWIGLU, torch.bfloat16, choice=[[-1, -1]] * 3, **size)
    got = run(nobody, "torch", recipe=recipe)
    assert all(not t.any() for t in got.values())
    none = make(SWIGLU, torch.bfloat16, choice=[], **size)
    plan = ExpertPlan(none.index, none.prob, none.offsets, torch.empty(0, 2, dtype=torch.int32))
    given = MLPWeights(none.w1, none.w2, none.b1, none.b2)
    x = none.x.reshape(0, 168)
    assert grouped_mlp(x, given, plan, MLPSpec(SWIGLU, "torch", recipe=recipe)).shape == (0, 168)


@EACH
def test_the_same_bits_twice_and_with_more_padding(recipe):
    once, again = (run(partial_blocks(), "torch", recipe=recipe) for _ in range(2))
    assert all(map(torch.equal, once.values(), again.values()))
    p = partial_blocks()
    index = torch.cat([p.index, p.index.new_zeros(64)])
    longer = replace(p, index=index, prob=torch.cat([p.prob, p.prob.new_ones(64)]))
    more = run(longer, "torch", recipe=recipe)
    assert all(torch.equal(once[k], more[k]) for k in once if k != "dprob")


@EACH
def test_gradients_added_to_main_grad(recipe):
    p = partial_blocks()
    leaves = leaves_of(p)
    for name in ("w1", "w2"):
        leaves[name].main_grad = torch.ones(leaves[name].shape)
    want = run(p, "torch", recipe=recipe)
    forward(p, leaves, "torch", recipe=recipe, accumulate=True).backward(p.dout)
    for name in ("w1", "w2"):
        assert error(leaves[name].main_grad - 1, want[f"d{name}"]) < 4e-3


@pytest.mark.parametrize(
    "recipe", [*RECIPES.values(), Fp8Block(wgrad="bf16"), Fp8Block(grad_format="e5m2")], ids=str
)
@pytest.mark.parametrize("act", [SWIGLU, Activation("squared_relu")], ids=lambda act: act.kind)
def test_halves_of_a_dense_mlp_are_the_whole_bit_for_bit(act, recipe):
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (150, 168), "w1": (act.width(136), 168), "w2": (168, 136)}
    given = {k: torch.randn(s, generator=g).bfloat16() for k, s in shapes.items()}
    whole, parts = ({k: v.clone().requires_grad_() for k, v in given.items()} for _ in range(2))
    dout = torch.randn(150, 168, generator=g).bfloat16()
    spec = MLPSpec(act, "torch", recipe=recipe)
    made = dense_fc2(dense_fc1(parts["x"], parts["w1"], spec), parts["w2"], spec)
    want = gradients(
        one_expert(whole["x"], MLPWeights(whole["w1"], whole["w2"]), spec), dout, whole
    )
    got = gradients(made, dout, parts)
    assert {k: torch.equal(got[k], want[k]) for k in want} == dict.fromkeys(want, True)
