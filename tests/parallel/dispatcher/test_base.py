"""Dispatch, experts, combine against one dense statement of an MoE layer, on 1, 2 and 4 gloo ranks.

The statement knows no ranks: out[t] = sum over k of prob[t, k] * x[t] @ W[idx[t, k]], over the
tokens of all ranks. Experts here are one matrix each; rows in the padding come out as NaN, as a
kernel may leave them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.docs import field_docs
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.parallel.dispatcher.base import Dispatcher, Local, TokenChoices, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget, Growth
from phalanx.parallel.dispatcher.transport import choose_transport
from phalanx.parallel.dispatcher.transport_class import Received
from tests.kernels.problems import Combine
from tests.parallel.dispatcher.budgets import overflowed
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow
from tests.support.sync_free import sync_free

CPU = torch.device("cpu")
TOKENS, HIDDEN, EXPERTS, TOP_K = 24, 16, 8, 3  # TOKENS: of all ranks together
SLOTS = TokenChoices(TOP_K, TOP_K)


class Result(NamedTuple):
    """Output and gradients, of a rank (its tokens, its experts) or of the whole."""

    out_TD: Tensor
    dx_TD: Tensor
    dprob_TK: Tensor
    dw_EDD: Tensor


class Case(NamedTuple):
    x_TD: Tensor
    idx_TK: Tensor
    prob_TK: Tensor
    w_EDD: Tensor
    dout_TD: Tensor


def routed(kind: str, tokens: int) -> Tensor:
    """Expert ids [tokens, TOP_K], distinct in a token."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if kind == "unequal":
        scores += torch.linspace(1.0, 0.0, EXPERTS)
    if kind == "none to the first half":
        scores[:, : EXPERTS // 2] -= 2
    if kind == "all to one rank":  # top 3 of 4 experts: the first rank of 2, the first two of 4
        scores[:, : EXPERTS // 2] += 2
    if kind == "all to the same experts":
        scores = torch.linspace(0.0, 1.0, EXPERTS).expand(tokens, -1)
    return scores.topk(TOP_K, dim=1).indices.to(torch.int32)


def make_case(
    kind: str, dtype: torch.dtype, *, integer: bool = False, tokens: int = TOKENS
) -> Case:
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        if integer:  # partial sums are integers below 256: exact in fp32 and in bf16
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    prob = draw(tokens, TOP_K) if integer else torch.rand(tokens, TOP_K, generator=generator)
    x, w, dout = draw(tokens, HIDDEN), draw(EXPERTS, HIDDEN, HIDDEN), draw(tokens, HIDDEN)
    return Case(x.to(dtype), routed(kind, tokens), prob, w.to(dtype), dout.to(dtype))


def dense(case: Case) -> Result:
    """The statement, in fp64; an empty slot adds nothing and gets no gradient."""
    x, prob, w = (t.double().requires_grad_() for t in (case.x_TD, case.prob_TK, case.w_EDD))
    idx, kept = case.idx_TK.clamp(min=0).long(), prob.masked_fill(case.idx_TK < 0, 0)
    out = torch.zeros_like(x)
    for k in range(idx.shape[1]):
        out = out + kept[:, k, None] * torch.einsum("td,tde->te", x, w[idx[:, k]])
    out.backward(case.dout_TD.double())
    assert x.grad is not None and prob.grad is not None and w.grad is not None
    return Result(out.detach(), x.grad, prob.grad, w.grad)


def experts(received: Received, w_LDD: Tensor) -> Tensor:
    plan = received.plan
    s = torch.arange(plan.row_index_S.numel(), dtype=torch.int32)
    e = torch.searchsorted(plan.offsets[1:], s, right=True, out_int32=True)
    e = e.clamp(max=len(w_LDD) - 1)
    x_SD = received.rows_ND.index_select(0, plan.row_index_S)
    y_SD = torch.einsum("sd,sde->se", x_SD.float(), w_LDD.index_select(0, e).float())
    y_SD = (y_SD * plan.row_prob_S[:, None]).to(x_SD.dtype)
    y_SD = torch.where((s < plan.offsets[-1])[:, None], y_SD, float("nan"))
    return sums(y_SD, received)


def sums(y_SD: Tensor, received: Received) -> Tensor:
    return Combine.apply(y_SD, received.plan, "torch")


def run_layer(
    dispatcher: Dispatcher,
    case: Case,
    rank: int,
    ranks: int,
    within: Callable[[], AbstractContextManager] = sync_free,
) -> Result:
    """One rank's part, forward and backward, without a host read: its tokens, its experts."""
    tokens, local = len(case.x_TD) // ranks, EXPERTS // ranks
    own_T, own_E = (slice(rank * n, (rank + 1) * n) for n in (tokens, local))
    x, prob = (t[own_T].clone().requires_grad_() for t in (case.x_TD, case.prob_TK))
    w = case.w_EDD[own_E].clone().requires_grad_()
    with within():
        received = dispatcher.dispatch(x, case.idx_TK[own_T], prob)
        out = dispatcher.combine(experts(received, w), received)
        out.backward(case.dout_TD[own_T])
    assert x.grad is not None and prob.grad is not None and w.grad is not None
    return Result(out.detach(), x.grad, prob.grad, w.grad)


def assert_near(result: Result, case: Case, what: str = "") -> None:
    """To the dense statement, in the dtypes of the case."""
    dtype = case.x_TD.dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, got, want in zip(Result._fields, result, dense(case), strict=True):
        assert got.dtype == (torch.float32 if name == "dprob_TK" else dtype)
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < tolerance, f"{what} {name}: {error:.1e} of the largest entry"


def assert_exact(result: Result, case: Case) -> None:
    """Equal to the dense statement, of integers that need no rounding."""
    want = dense(case)
    assert max(t.abs().max().item() for t in want) < 256
    for name, got, exact in zip(Result._fields, result, want, strict=True):
        assert torch.equal(got.double(), exact), name


def dispatcher_of(
    name: str,
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **given: Any,
) -> Dispatcher:
    """A dispatcher as a run builds it; collective over the job."""
    return make_dispatcher(choose_transport(name, group, dtype), group=group, **given)


def rank_layer(case: Case, name: str) -> Result:
    budget = Budget(8.0, CPU)
    group = dist.group.WORLD
    how: dict[str, Any] = dict(experts=EXPERTS, slots=SLOTS, budget=budget, dtype=case.x_TD.dtype)
    dispatcher = dispatcher_of(name, group, **how)
    result = run_layer(dispatcher, case, dist.get_rank(), dist.get_world_size())
    assert not overflowed(budget, group)
    again = run_layer(dispatcher, case, dist.get_rank(), dist.get_world_size())
    assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True)), "not deterministic"
    return result


def layer(case: Case, name: str, ranks: int) -> Result:
    """The whole layer over `ranks` ranks; 0 ranks have no process group."""
    if ranks == 0:
        made = dispatcher_of(name, None, experts=EXPERTS, slots=SLOTS, budget=Budget(1.0, CPU))
        return run_layer(made, case, 0, 1)
    results = run_distributed(rank_layer, ranks, case, name)
    return Result(*map(torch.cat, zip(*results, strict=True)))


ROUTINGS = (
    "even",
    "unequal",
    "none to the first half",
    "all to one rank",
    "all to the same experts",
)
ELSEWHERE = {
    "symm": "tests/parallel/dispatcher/test_symm.py and test_symm_gpu.py: it needs GPUs",
    "hier": "tests/extras/between_nodes/test_hierarchical.py: it needs several nodes",
}
"""Transports that gloo ranks of one node cannot run, and where their tests are."""
LAYERS = [
    pytest.param(name, ranks, marks=pytest.mark.dist if ranks else (), id=f"{name}-{ranks}")
    for name in TRANSPORTS
    if name not in ELSEWHERE
    for ranks in ((0,) if name == "local" else (1, 2, 4))
]
"""Names and numbers of ranks: a transport is here as soon as it has an entry."""


def test_every_transport_can_be_chosen() -> None:
    assert all(f"`{name}`:" in field_docs()["parallel.dispatch"] for name in TRANSPORTS)
    assert set(ELSEWHERE) <= set(TRANSPORTS)


@mostly_slow("dtype", [torch.float32, torch.bfloat16], torch.bfloat16)
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("name", "ranks"), LAYERS)
def test_equals_the_dense_statement(name: str, ranks: int, kind: str, dtype: torch.dtype) -> None:
    case = make_case(kind, dtype)
    assert_near(layer(case, name, ranks), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["even", "unequal"])
@pytest.mark.parametrize(("name", "ranks"), LAYERS)
def test_exact_on_integers(name: str, ranks: int, kind: str, dtype: torch.dtype) -> None:
    """Without rounding, every number of ranks gives the same bits: no row is lost or misplaced."""
    case = make_case(kind, dtype, integer=True)
    assert_exact(layer(case, name, ranks), case)


def all_to_all(experts: int, top_k: int) -> Dispatcher:
    slots, budget = TokenChoices(top_k, top_k), Budget(8.0, CPU)
    return dispatcher_of("alltoall", dist.group.WORLD, experts=experts, slots=slots, budget=budget)


def received_rows(x_RTD: Tensor, idx_RTK: Tensor, prob_RTK: Tensor) -> Received:
    r = dist.get_rank()
    dispatcher = all_to_all(EXPERTS, TOP_K)
    return dispatcher.dispatch(x_RTD[r], idx_RTK[r], prob_RTK[r])


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_token_t_of_rank_r_is_row_r_t(ranks: int) -> None:
    """The fixed layout that other transports share, on every row that a rank's experts read."""
    case = make_case("unequal", torch.float32)
    shards = [t.view(ranks, TOKENS // ranks, -1) for t in (case.x_TD, case.idx_TK, case.prob_TK)]
    for rank, received in enumerate(run_distributed(received_rows, ranks, *shards)):
        assert received.rows_ND.shape == case.x_TD.shape and received.overlap is None
        local = EXPERTS // ranks
        mine = (case.idx_TK >= rank * local) & (case.idx_TK < (rank + 1) * local)
        assert torch.equal(received.plan.inverse_NK >= 0, mine)
        rows = mine.any(dim=1)
        assert torch.equal(received.rows_ND[rows], case.x_TD[rows])


def sum_in_bf16() -> Tensor:
    """Each of 4 ranks adds one expert's row to every token: 256, 1, 1 and 1."""
    r, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = all_to_all(ranks, ranks)
    idx = torch.arange(ranks, dtype=torch.int32).expand(5, -1)
    received = dispatcher.dispatch(
        torch.zeros(5, 2, dtype=torch.bfloat16), idx, torch.ones(5, ranks)
    )
    value = 256.0 if r == 0 else 1.0
    y = torch.full((received.plan.row_index_S.numel(), 2), value, dtype=torch.bfloat16)
    return dispatcher.combine(sums(y, received), received)


@pytest.mark.dist
def test_ranks_are_summed_in_fp32() -> None:
    """256 + 1 + 1 + 1 = 259 rounds once to 260 in bf16; added up in bf16 it would stay 256."""
    for out in run_distributed(sum_in_bf16, 4):
        assert torch.equal(out, torch.full((5, 2), 260.0, dtype=torch.bfloat16))


class Rerun(NamedTuple):
    """A layer that is run again after its budget has grown."""

    overflowed: list[bool]
    """The first time, and again."""
    grown: list[Growth]
    result: Result
    """Results of the second time."""


def rerun(dispatcher: Dispatcher, budget: Budget, case: Case) -> Rerun:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    run_layer(dispatcher, case, rank, ranks)
    found, grown = [overflowed(budget, group)], budget.grow()
    result = run_layer(dispatcher, case, rank, ranks)
    return Rerun([*found, overflowed(budget, group)], grown, result)


def overflow_and_rerun(case: Case) -> tuple[list[bool], int, Result]:
    budget = Budget(1.0, CPU)
    given: dict[str, Any] = dict(experts=EXPERTS, slots=SLOTS, budget=budget)
    made = rerun(dispatcher_of("auto", dist.group.WORLD, **given), budget, case)
    return made.overflowed, budget.reruns, made.result


@pytest.mark.dist
def test_an_overflowed_step_fits_when_run_again() -> None:
    """All tokens to one rank of two need twice the balanced rows; both ranks must run again."""
    case = make_case("all to one rank", torch.float32, tokens=256)
    overflowed, reruns, results = zip(*run_distributed(overflow_and_rerun, 2, case), strict=True)
    assert overflowed == ([True, False], [True, False]) and reruns == (1, 1)
    for got, want in zip(map(torch.cat, zip(*results, strict=True)), dense(case), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def refusals() -> list[str]:
    budget, messages = Budget(1.0, CPU), []
    for name, experts, top_k in (
        ("local", 8, 2),
        ("alltoall", 7, 2),
        ("symmetric", 8, 2),
        ("auto", 8, 9),
    ):
        with pytest.raises(ValueError) as error:
            slots = TokenChoices(top_k, top_k)
            dispatcher_of(name, dist.group.WORLD, experts=experts, slots=slots, budget=budget)
        messages.append(str(error.value))
    return messages


@pytest.mark.dist
def test_a_transport_that_cannot_run_names_the_override() -> None:
    local, divide, unknown, top_k = run_distributed(refusals, 2)[0]
    assert "parallel.dispatch=alltoall or parallel.expert=1" in local
    assert "set parallel.expert to a divisor" in divide
    assert f"set it to {', '.join(['auto', *TRANSPORTS][:-1])} or alltoall" in unknown
    assert "model.moe.top_k=9" in top_k


def test_one_rank_is_local_and_copies_nothing() -> None:
    given = dict(experts=8, slots=TokenChoices(2, 2), budget=Budget(1.5, CPU))
    dispatcher = dispatcher_of("auto", None, **given)
    x, idx = torch.randn(10, 4), torch.zeros(10, 2, dtype=torch.int32)
    received = dispatcher.dispatch(x, idx, torch.rand(10, 2))
    assert isinstance(dispatcher, Local)
    assert received.rows_ND is x
    assert received.plan.row_index_S.numel() == 20
    with pytest.raises(ValueError, match="parallel.dispatch=local"):
        dispatcher_of("alltoall", None, **given)


@pytest.mark.parametrize(
    ("slots", "tokens", "ranks", "local", "most"),
    [
        (TokenChoices(3, 3), 100, 1, 8, 300),
        (TokenChoices(3, 3), 100, 4, 2, 800),  # two experts a rank: each token comes twice at most
        (TokenChoices(3, 6, 64), 100, 1, 8, 600),  # every slot taken
        (TokenChoices(3, 6, 4), 100, 1, 8, 332),  # 4 more for each of the 8 experts
        (TokenChoices(3, 6, 4), 100, 4, 2, 800),
        (TokenChoices(1, 2, 4), 100, 4, 2, 432),
    ],
)
def test_most_rows(slots: TokenChoices, tokens: int, ranks: int, local: int, most: int) -> None:
    assert slots.max_rows(tokens, ranks, local) == most
    budget = Budget(50.0, CPU)
    assert budget.rows(tokens, slots.top_k, ranks, local, most=most) == most


def test_empty_slots_have_no_rows() -> None:
    """Ids of -1 between others, and a token that has nothing else, which comes back as zeros."""
    slots, budget = TokenChoices(1, 3, 2), Budget(1.0, CPU)
    dispatcher = dispatcher_of("local", None, experts=4, slots=slots, budget=budget)
    idx = torch.tensor([[2, -1, 0], [-1, -1, -1], [-1, 3, -1]], dtype=torch.int32)
    received = dispatcher.dispatch(torch.randn(3, 4), idx, torch.ones(3, 3))
    assert received.plan.offsets.tolist() == [0, 1, 1, 2, 3]
    assert (received.plan.inverse_NK >= 0).equal(idx >= 0)
    out = dispatcher.combine(
        sums(torch.ones(len(received.plan.row_index_S), 4), received), received
    )
    assert out[:, 0].tolist() == [2, 0, 1]


def test_what_is_added_follows_in_its_order() -> None:
    """In bf16 the order of addends shows."""
    dispatcher = dispatcher_of(
        "local", None, experts=1, slots=TokenChoices(1, 1), budget=Budget(1.0, CPU)
    )
    idx = torch.zeros(1, 1, dtype=torch.int32)
    received = dispatcher.dispatch(torch.ones(1, 8).bfloat16(), idx, torch.ones(1, 1))
    out, small, large = (torch.full((1, 8), v).bfloat16() for v in (1.0, 2.0**-8, -1.0))
    got = dispatcher.combine(out, received, small, large)
    assert torch.equal(got, (out + small) + large)
    assert not torch.equal(got, (out + large) + small)
    assert torch.equal(dispatcher.combine(out, received, large), out + large)


def test_shapes_that_do_not_fit_are_named() -> None:
    dispatcher = dispatcher_of(
        "local", None, experts=8, slots=TokenChoices(2, 2), budget=Budget(1.5, CPU)
    )
    with pytest.raises(ValueError, match="top_k=2"):
        dispatcher.dispatch(
            torch.randn(10, 4), torch.zeros(9, 2, dtype=torch.int32), torch.rand(9, 2)
        )
