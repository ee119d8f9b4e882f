"""Experts of other ranks beside a rank's own on an NVIDIA GPU: the bits of the same experts as own
ones, in two launches for one. Guests' rows begin at any row, also inside a tile or a block of FP8.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec
from phalanx.kernels.quantize.recipe import Fp8Block, Microscaling
from phalanx.kernels.registry import Facts, KernelUnavailable, resolve
from tests.extras.replication.kernels.replicas import (
    Copied,
    compare,
    experts_of,
    same,
    with_replicas,
    without,
)
from tests.kernels.problems import Problem, Result, make

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SWIGLU, UNGATED = Activation("swiglu"), Activation("squared_relu")
GPT_OSS = Activation("quick_geglu", alpha=1.702, limit=7.0, offset=1.0)
OWN, ROWS, TOKENS = 5, 1200, 640
COUNTS = {
    "an empty slot": [128, 0, 1, 127, 129, 129, 0, 127],
    "one row": [129, 127, 128, 0, 0, 1, 128, 0],
    "no rows for replicas": [127, 1, 0, 129, 128, 0, 0, 0],
    "all rows for replicas": [0, 0, 0, 0, 0, 129, 1, 500],
    "many rows": [1, 300, 17, 129, 64, 255, 257, 128],
}
RECIPES = {
    "bf16": None,
    "fp8_block": Fp8Block(),
    "e5m2, h in fp8": Fp8Block("e5m2", hidden="fp8"),
}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    facts = Facts("cuda", torch.cuda.get_device_capability(), BF16, hidden=256, ffn=192)
    try:
        resolve("grouped_mlp", "fused", facts)
    except KernelUnavailable as reason:
        pytest.skip(str(reason))


def problem(counts: str, act: Activation = SWIGLU, *, bias: bool = False) -> Problem:
    """Rows of each place by its name, in tokens of two slots that are drawn."""
    ids = [e for e, count in enumerate(COUNTS[counts]) for _ in range(count)]
    pairs = torch.tensor([*ids, *[-1] * (2 * TOKENS - len(ids))])
    g = torch.Generator().manual_seed(len(ids))
    choice = pairs[torch.randperm(len(pairs), generator=g)].view(TOKENS, 2).tolist()
    sizes: dict[str, Any] = dict(L=len(COUNTS[counts]), D=256, width=192, rows=ROWS)
    return make(act, BF16, bias=bias, choice=choice, **sizes).to("cuda")


def order_of(p: Problem) -> Tensor:
    """Order of experts in plans of the fused kernels."""
    return p.offsets.diff().sort(descending=True, stable=True).indices.to(torch.int32)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act", [SWIGLU, UNGATED], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_bits_of_own_experts(counts: str, recipe: str, act: Activation, bias: bool) -> None:
    p = problem(counts, act, bias=bias)
    spec = MLPSpec(act, "fused", accumulate=True, recipe=RECIPES[recipe])
    compare(p, OWN, spec, order=order_of(p))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["plan without an order", "h computed again", "weights kept"])
def test_variants(how: str, recipe: str) -> None:
    p = problem("many rows", GPT_OSS, bias=True)
    spec = MLPSpec(GPT_OSS, "fused", accumulate=True, recipe=RECIPES[recipe])
    spec = replace(spec, recompute_h=how == "h computed again")
    order = None if how == "plan without an order" else order_of(p)
    compare(p, OWN, spec, order=order, keep=how == "weights kept")


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_margins_change_nothing(recipe: str) -> None:
    p = problem("an empty slot", bias=True)
    spec = MLPSpec(SWIGLU, "fused", accumulate=True, recipe=RECIPES[recipe])
    want = without(p, OWN, spec, order=order_of(p))
    for free in (8, 64):
        other = replace(spec, margins=Margins(free, free, free))
        replicas = Copied(experts_of(p, slice(OWN, None)))
        same(with_replicas(p, OWN, other, replicas=replicas, order=order_of(p)), want)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_buffers_in_bf16(recipe: str) -> None:
    p = problem("many rows")
    spec = MLPSpec(SWIGLU, "fused", accumulate=True, recipe=RECIPES[recipe])
    replicas = Copied(experts_of(p, slice(OWN, None)))
    got = with_replicas(p, OWN, spec, replicas=replicas, main_grad=BF16)
    want = without(p, OWN, spec, main_grad=BF16)
    for name in ("out", "dx", "dprob", "w1", "w2"):
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("recipe", [None, Microscaling("mxfp8"), Fp8Block()], ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_mm_of_torch(counts: str, recipe: Any) -> None:
    compare(
        problem(counts, bias=True), OWN, MLPSpec(SWIGLU, "torch", recipe=recipe, accumulate=True)
    )


def step(p: Problem, order: Tensor, spec: MLPSpec) -> Result:
    replicas = Copied(experts_of(p, slice(OWN, None)))
    return with_replicas(p, OWN, spec, replicas=replicas, order=order)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_host_never_waits(recipe: str) -> None:
    p = problem("an empty slot", bias=True)
    spec, order = MLPSpec(SWIGLU, "fused", accumulate=True, recipe=RECIPES[recipe]), order_of(p)
    want = step(p, order, spec)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(p, order, spec)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same(got, want, before=0.0)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_a_graph_replays_other_routings(recipe: str) -> None:
    problems = [problem(counts, bias=True) for counts in COUNTS]
    spec = MLPSpec(SWIGLU, "fused", accumulate=True, recipe=RECIPES[recipe])
    given = [f.name for f in fields(Problem) if isinstance(getattr(problems[0], f.name), Tensor)]
    static = replace(problems[0], **{name: getattr(problems[0], name).clone() for name in given})
    order = order_of(static)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(static, order, spec)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(static, order, spec)
    for p in problems[::-1]:
        for name in given:
            getattr(static, name).copy_(getattr(p, name))
        order.copy_(order_of(p))
        graph.replay()
        same(got, without(p, OWN, spec, order=order_of(p)))
