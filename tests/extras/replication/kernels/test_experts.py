"""Experts of other ranks beside a rank's own, against the same experts as its own, bit for bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from phalanx.extras.replication.kernels.experts import ReplicatedExperts, split_in_order
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.recipe import Fp8Block, Microscaling
from tests.extras.replication.kernels.replicas import (
    Copied,
    compare,
    experts_of,
    same,
    with_replicas,
    without,
)
from tests.kernels.problems import Problem, make, random_choice
from tests.support.scheduling import mostly_slow

BF16 = torch.bfloat16
SWIGLU, UNGATED = Activation("swiglu"), Activation("squared_relu")
OWN, PLACES = 4, 6
BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch"])
LENT = ["send_weights fc2", "wait fc2", "wait fc1"]
BACK = ["grad_buffer", "send_grads fc1", "send_grads fc2", "reduce_grads fc1", "reduce_grads fc2"]
PASSES = [["send_weights fc1", "wait fc1", "wait fc2"], [*LENT, *BACK]]
ROUTINGS = {
    "an empty slot": [0, 1, 3, 5],
    "all places": list(range(PLACES)),
    "no rows for replicas": [0, 1, 3],
    "all rows for replicas": [4, 5],
    "no rows": [],
}


def problem(
    routing: str = "all places", act: Activation = SWIGLU, dtype: torch.dtype = BF16, **given: Any
) -> Problem:
    choice = random_choice(150, 3, ROUTINGS[routing])
    sizes = dict(D=64, width=48) | given
    return make(act, dtype, choice=choice, L=PLACES, rows=460, **sizes)


def spec(backend: str, act: Activation = SWIGLU, **given: Any) -> MLPSpec:
    return MLPSpec(act, backend, accumulate=True, **given)


@BACKENDS
@pytest.mark.parametrize("act", [SWIGLU, UNGATED], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_bits_of_own_experts(routing: str, act: Activation, backend: str) -> None:
    _, log = compare(problem(routing, act), OWN, spec(backend, act))
    assert log == [*PASSES[0], *PASSES[1]]


VARIANTS: dict[str, dict[str, Any]] = {
    "h computed again": dict(recompute_h=True),
    "fp8_block": dict(recipe=Fp8Block()),
    "fp8_block, e5m2, h in fp8": dict(recipe=Fp8Block("e5m2", hidden="fp8")),
    "fp8_block, wgrad in bf16": dict(recipe=Fp8Block(wgrad="bf16")),
    "fp8_block, h computed again": dict(recipe=Fp8Block(), recompute_h=True),
    "mxfp8": dict(recipe=Microscaling("mxfp8")),
    "mxfp8, wgrad in bf16": dict(recipe=Microscaling("mxfp8", wgrad="bf16")),
    "nvfp4": dict(recipe=Microscaling("nvfp4", stochastic=False)),
    "nvfp4, wgrad in bf16": dict(recipe=Microscaling("nvfp4", wgrad="bf16", stochastic=False)),
}


@BACKENDS
@mostly_slow("bias", [False, True], True)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, bias: bool, backend: str) -> None:
    p = problem("an empty slot", D=192, width=160, bias=bias)
    compare(p, OWN, spec(backend, **VARIANTS[name]))


@BACKENDS
def test_no_slots_and_no_own_experts(backend: str) -> None:
    _, log = compare(problem(), PLACES, spec(backend))
    assert log == [*PASSES[0], *PASSES[1]], "other ranks may have slots"


@BACKENDS
def test_weights_that_are_kept_are_lent_once(backend: str) -> None:
    _, log = compare(problem(), OWN, spec(backend), keep=True)
    assert log == [*PASSES[0], *BACK]


@BACKENDS
@pytest.mark.parametrize("frozen", [("w1",), ("w2", "b1"), ("b1", "b2")], ids=str)
def test_some_weights_are_frozen(frozen: tuple[str, ...], backend: str) -> None:
    compare(problem(), OWN, spec(backend), frozen=frozen)


@BACKENDS
def test_frozen_experts_give_nothing_back(backend: str) -> None:
    _, log = compare(problem(), OWN, spec(backend), frozen=("w1", "w2", "b1", "b2"))
    assert log == [*PASSES[0], *LENT]


@BACKENDS
def test_buffers_in_bf16(backend: str) -> None:
    """Gradients of own experts in bf16: returned ones are added in place, and rounded again."""
    p, how, made = problem(), spec(backend), dict(main_grad=BF16)
    got = with_replicas(p, OWN, how, replicas=Copied(experts_of(p, slice(OWN, None))), **made)
    want = without(p, OWN, how, **made)
    for name in ("w1", "w2", "b1", "b2"):
        assert got[name].dtype == BF16 and torch.equal(got[name], want[name]), name


@BACKENDS
def test_gradients_are_returned_in_the_dtype_of_weights(backend: str) -> None:
    p, how = problem(dtype=torch.float32), replace(spec(backend), accumulate=False)
    got = with_replicas(p, OWN, how, replicas=Copied(experts_of(p, slice(OWN, None))))
    same(got, without(p, OWN, how), before=0.0)


@BACKENDS
def test_evaluation_borrows_and_gives_nothing_back(backend: str) -> None:
    p = problem()
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)
    replicas, how = Copied(experts_of(p, slice(OWN, None))), spec(backend)
    with torch.no_grad():
        experts = ReplicatedExperts(replicas)
        out = grouped_mlp(p.x, experts_of(p, slice(OWN)), plan, how, experts=experts)
        want = grouped_mlp(p.x, MLPWeights(p.w1, p.w2, p.b1, p.b2), plan, how)
    assert torch.equal(out, want) and replicas.log == PASSES[0]


def test_parts_keep_the_order_of_the_whole() -> None:
    order = torch.tensor([4, 1, 5, 0, 3, 2], dtype=torch.int32)
    offsets = torch.arange(0, 70, 10, dtype=torch.int32)
    own, replicas = split_in_order(ExpertPlan(None, None, offsets, None, None, order), OWN)
    assert own.order_L.tolist() == [1, 0, 3, 2] and replicas.order_L.tolist() == [0, 1]
    assert own.order_L.dtype == replicas.order_L.dtype == torch.int32
    assert own.offsets.tolist() == [0, 10, 20, 30, 40] and replicas.offsets.tolist() == [40, 50, 60]


def test_cudnn_takes_no_replicas() -> None:
    p = problem()
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)
    own, replicas = experts_of(p, slice(OWN)), Copied(experts_of(p, slice(OWN, None)))
    with pytest.raises(ValueError, match="kernels=cudnn has no expert replication"):
        grouped_mlp(p.x, own, plan, spec("cudnn"), experts=ReplicatedExperts(replicas))
