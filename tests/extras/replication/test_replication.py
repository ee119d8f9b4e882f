"""Expert replication over gloo ranks, against the same layer without replication and the plan.

Rows of results and gradients of tokens must have the same bits. Gradients of weights are sums in
another order, which the plan tells: they are compared with those of the parts, added up in the
order of ranks.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationPlan,
    ReplicationSize,
    assign_pairs,
    count_rows,
    pair_numbers,
    reference_replication_plan,
)
from phalanx.extras.replication.options import ReplicationOptions
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.base import TokenChoices, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.transport_class import Dispatcher, Transport
from tests.parallel.dispatcher.gloo_exchange import experts
from tests.support.distributed import run_distributed
from tests.support.scheduling import matrix, mostly_slow
from tests.support.sync_free import sync_free

pytestmark = pytest.mark.dist

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 768, 32, 16, 8, 3
"""TOKENS: of all ranks."""
SPEC = MLPSpec(Activation("swiglu"), "torch")


class Problem(NamedTuple):
    """A layer and its tokens, of all ranks."""

    x: Tensor
    idx: Tensor
    prob: Tensor
    weights: MLPWeights
    dout: Tensor


class Made(NamedTuple):
    """Results of one rank."""

    out: Tensor
    dx: Tensor
    dprob: Tensor
    grads: list[Tensor]
    """fp32, of w1, w2, b1, b2, after two micro-batches."""
    replicas: int


def routed(kind: str) -> Tensor:
    """Distinct experts of each token, with -1 in some slots."""
    if kind == "even":
        return (torch.arange(TOKENS)[:, None] + torch.arange(TOP_K)).remainder(EXPERTS).int()
    g = torch.Generator().manual_seed(5)
    scores = torch.rand(TOKENS, EXPERTS, generator=g)
    if kind == "one hot expert":
        scores[:, 5] += 0.7
    if kind == "one expert with all":
        scores[:, 1:] -= 2.0
    if kind == "one rank with all":  # the first of two, the first two of four
        scores[:, : EXPERTS // 2] += 1.0
    if kind == "one rank of each node":  # of four, as two nodes of two
        scores[:, [0, 1, 6, 7]] += 1.0
    if kind == "several hot experts":
        scores += torch.linspace(0.9, 0.0, EXPERTS)
    idx = scores.topk(TOP_K, dim=1).indices.int()
    empty = torch.rand(TOKENS, TOP_K, generator=g) < 0.1
    if kind == "one expert with all":
        empty[:, 1:] = True
        empty[:, 0] = False
    return idx.masked_fill(empty, -1)


def problem(kind: str, dtype: torch.dtype, bias: bool = False) -> Problem:
    g = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * scale).to(dtype)

    weights = MLPWeights(
        draw(EXPERTS, 2 * WIDTH, HIDDEN, scale=0.3),
        draw(EXPERTS, HIDDEN, WIDTH, scale=0.3),
        draw(EXPERTS, 2 * WIDTH, scale=0.1) if bias else None,
        draw(EXPERTS, HIDDEN, scale=0.1) if bias else None,
    )
    prob = torch.rand(TOKENS, TOP_K, generator=g)
    return Problem(draw(TOKENS, HIDDEN), routed(kind), prob, weights, draw(TOKENS, HIDDEN))


def parts(p: Problem, rank: int, ranks: int) -> Problem:
    """Tokens and experts of one rank."""
    own = [None if w is None else w.chunk(ranks)[rank].clone() for w in p.weights]
    x, idx, prob, dout = (t.chunk(ranks)[rank].clone() for t in (p.x, p.idx, p.prob, p.dout))
    return Problem(x, idx, prob, MLPWeights(*own), dout)  # type: ignore[arg-type]


def dispatcher_of(transport: Transport, spec: MLPSpec, **how: Any) -> Dispatcher:
    """The dispatcher of all ranks, whose rows fit any routing."""
    return make_dispatcher(
        transport,
        group=dist.group.WORLD,
        experts=EXPERTS,
        slots=TokenChoices(TOP_K, TOP_K),
        budget=Budget(float(EXPERTS), torch.device("cpu")),
        backend=spec.backend,
        recipe=spec.recipe,
        connections=Connections(),
        **how,
    )


def collectives(replication: ReplicationOptions | None, spec: MLPSpec) -> Dispatcher:
    return dispatcher_of(Transport("alltoall", "wanted", replication=replication), spec)


def layer(
    p: Problem,
    dispatcher: Dispatcher,
    spec: MLPSpec,
    *,
    crossed: bool = False,
    shared: bool = False,
) -> Made:
    """Results of two micro-batches of the same tokens, the second in the opposite order.

    With `crossed` both go forward before the first goes backward.
    """
    own = parts(p, dist.get_rank(), dist.get_world_size())
    weights = MLPWeights(*(None if w is None else w.requires_grad_() for w in own.weights))
    for w in weights:
        if w is not None and spec.accumulate:
            w.main_grad = torch.full_like(w, 0.125, dtype=torch.float32)
    found, waiting = [], []

    def back(out: Tensor, x: Tensor, prob: Tensor, dout: Tensor, replicas: int) -> None:
        out.backward(dout)
        found.append((out.detach(), x.grad, prob.grad, replicas))

    for turn in (slice(None), torch.arange(len(own.x) - 1, -1, -1)):
        x, prob = own.x[turn].requires_grad_(), own.prob[turn].requires_grad_()
        received = dispatcher.dispatch(x, own.idx[turn], prob)
        out = experts(received, weights, spec)
        sums = dispatcher.send_sums(out, received, alone=not shared)
        addends = [x * 0.5] * shared + [own.x[turn]]
        out = dispatcher.receive_sums(sums, received, addends)
        planned: ReplicationPlan | None = received.statistics
        replicas = 0 if planned is None else int((planned.expert_RN >= 0).sum())
        waiting.append((out, x, prob, own.dout[turn], replicas))
        if not crossed:
            back(*waiting.pop())
    for given in waiting:
        back(*given)
    of = [w for w in weights if w is not None]
    grads = [w.main_grad if spec.accumulate else w.grad for w in of]
    out, dx, dprob, replicas = zip(*found, strict=True)
    return Made(torch.cat(out), torch.cat(dx), torch.cat(dprob), grads, min(replicas))


def both(kind: str, dtype: torch.dtype, backend: str, options: dict[str, Any]) -> tuple[Made, Made]:
    p = problem(kind, dtype, options.pop("bias", False))
    slots, keep = options.pop("slots", 2), options.pop("keep", False)
    spec = MLPSpec(Activation("swiglu"), backend, **{"accumulate": True, **options})
    replication = ReplicationOptions(slots, cost=10, keep=keep)
    with_replication = layer(p, collectives(replication, spec), spec)
    again = layer(p, collectives(replication, spec), spec)
    for name, a, b in zip(Made._fields, with_replication, again, strict=True):
        same = all(map(torch.equal, a, b)) if isinstance(a, list) else a is b or a == b
        same = torch.equal(a, b) if isinstance(a, Tensor) else same
        assert same, f"{name} is not deterministic"
    return with_replication, layer(p, collectives(None, spec), spec)


KINDS = ("one hot expert", "one expert with all", "one rank with all", "several hot experts")


def check(made: list[tuple[Made, Made]], *, replicas: bool = True, near: float = 1e-5) -> None:
    for got, want in made:
        assert (got.replicas > 0) == replicas
        for name in ("out", "dx", "dprob"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        for a, b in zip(got.grads, want.grads, strict=True):
            assert (a.float() - b.float()).norm() <= near * b.float().norm()


@pytest.mark.parametrize("kind", KINDS)
@matrix(("backend", "ranks"), ("reference", 4), ("torch", 2))
def test_the_bits_of_the_layer_without_replication(backend: str, kind: str, ranks: int) -> None:
    made = run_distributed(both, ranks, kind, torch.bfloat16, backend, {})
    check(made, near=1e-5 if backend == "reference" else 4e-3)  # torch rounds each part to bf16


CHANGES: dict[str, dict[str, Any]] = {
    "weights kept": {"keep": True},
    "biases, h computed again": {"bias": True, "recompute_h": True},
    "fp8_block": {"recipe": Fp8Block()},
    "fp8_block, bf16 weight gradients": {"recipe": Fp8Block(wgrad="bf16")},
    "gradients returned": {"accumulate": False},
    "one slot": {"slots": 1},
    "three slots": {"slots": 3},
}


@mostly_slow(
    "name",
    CHANGES,
    *("weights kept", "biases, h computed again", "fp8_block", "gradients returned", "one slot"),
)
def test_variants(name: str) -> None:
    options = dict(CHANGES[name])
    made = run_distributed(both, 2, "several hot experts", torch.bfloat16, "reference", options)
    check(made, near=4e-3 if name == "gradients returned" else 1e-5)


def test_fp32() -> None:
    check(run_distributed(both, 2, "one hot expert", torch.float32, "torch", {}))


def test_even_routing_replicates_nothing() -> None:
    made = run_distributed(both, 4, "even", torch.bfloat16, "torch", {})
    check(made, replicas=False, near=0.0)


def part_gradient(p: Problem, pairs_TK: Tensor, expert: int) -> list[Tensor]:
    """fp32 gradients of an expert's weights, of those of its pairs that are chosen."""
    rows = pairs_TK.any(1).nonzero().flatten()
    prob = (p.prob * pairs_TK).sum(1)[rows]
    one = [w[expert : expert + 1].clone().requires_grad_() for w in p.weights[:2]]
    for w in one:
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    ends = torch.tensor([0, len(rows)], dtype=torch.int32)
    spec = MLPSpec(Activation("swiglu"), "reference", accumulate=True)
    out = grouped_mlp(p.x[rows], MLPWeights(*one), ExpertPlan(None, prob, ends, None), spec)
    out.backward(p.dout[rows])
    return [w.main_grad[0] for w in one]


def once(kind: str, slots: int) -> list[Tensor]:
    spec = MLPSpec(Activation("swiglu"), "reference")
    dispatcher = collectives(ReplicationOptions(slots, cost=10), spec)
    return gradients(problem(kind, torch.bfloat16), dispatcher)


def gradients(p: Problem, dispatcher: Dispatcher) -> list[Tensor]:
    """Gradients of own experts of one micro-batch, in buffers that held 0.125."""
    own = parts(p, dist.get_rank(), dist.get_world_size())
    spec = MLPSpec(Activation("swiglu"), "reference", accumulate=True)
    weights = MLPWeights(*(w.requires_grad_() for w in own.weights[:2]))
    for w in weights[:2]:
        w.main_grad = torch.full_like(w, 0.125, dtype=torch.float32)
    received = dispatcher.dispatch(own.x, own.idx, own.prob)
    out = experts(received, weights, spec)
    dispatcher.combine(out, received).backward(own.dout)
    return [w.main_grad for w in weights[:2]]


@matrix(("kind", "ranks"), *((kind, 4) for kind in KINDS), ("several hot experts", 2))
def test_gradients_are_those_that_the_plan_predicts(kind: str, ranks: int) -> None:
    p, slots = problem(kind, torch.bfloat16), 2
    plan = reference_replication_plan(count_rows(p.idx, EXPERTS), ReplicationSize(ranks, slots, 10))
    assert (assign_pairs(p.idx, plan) < 0).equal(p.idx < 0)
    as_planned(p, plan, run_distributed(once, ranks, kind, slots))


def as_planned(p: Problem, plan: ReplicationPlan, grads: list[list[Tensor]]) -> None:
    """0.125, then the owner's part, then those of its copies in the order of ranks."""
    number = pair_numbers(p.idx.flatten(), EXPERTS).view_as(p.idx)
    got = [torch.cat(of) for of in zip(*grads, strict=True)]
    for expert in range(EXPERTS):
        spans = [(0, int(plan.owner_rows_E[expert]))]
        for borrower in range(len(plan.expert_RN)):
            for slot in (plan.expert_RN[borrower] == expert).nonzero().flatten().tolist():
                spans.append((int(plan.begin_RN[borrower, slot]), int(plan.end_RN[borrower, slot])))
        want = [torch.full_like(w[expert], 0.125, dtype=torch.float32) for w in p.weights[:2]]
        for begin, end in spans:
            chosen = (p.idx == expert) & (number >= begin) & (number < end)
            made = part_gradient(p, chosen, expert)
            want = [a + b for a, b in zip(want, made, strict=True)]
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[expert], b)


def forward_only() -> None:
    own = parts(problem("one hot expert", torch.bfloat16), dist.get_rank(), 2)
    dispatcher = collectives(ReplicationOptions(2, cost=10), SPEC)
    x, prob = own.x.requires_grad_(), own.prob.requires_grad_()
    weights = MLPWeights(*(w.requires_grad_() for w in own.weights[:2]))
    with sync_free():
        received = dispatcher.dispatch(x, own.idx, prob)
        out = dispatcher.combine(experts(received, weights, SPEC), received)
        out.backward(own.dout)
        with torch.no_grad():
            received = dispatcher.dispatch(x, own.idx, prob)
            again = dispatcher.combine(experts(received, weights, SPEC), received)
    assert torch.equal(out, again)


def test_the_host_learns_nothing_and_evaluation_gives_the_same() -> None:
    run_distributed(forward_only, 2)
