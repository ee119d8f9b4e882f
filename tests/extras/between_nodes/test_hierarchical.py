"""The transport over nodes: gloo ranks that pretend to be nodes of two, or of four.

Everything is compared with the dense statement of test_dispatch, or with `alltoall`.
"""

import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.quantize.quantize import row_bytes
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatcher import nodes
from phalanx.parallel.dispatcher.base import Dispatcher, TokenChoices, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget, Capacity
from phalanx.parallel.dispatcher.transport import choose_transport, refuse
from phalanx.parallel.dispatcher.transport_class import Transport
from tests.parallel.dispatcher.test_base import (
    CPU,
    EXPERTS,
    HIDDEN,
    ROUTINGS,
    SLOTS,
    TOKENS,
    Case,
    Rerun,
    Result,
    assert_exact,
    assert_near,
    dense,
    dispatcher_of,
    make_case,
    rerun,
    run_layer,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow, slow
from tests.support.training import pretended_nodes

pytestmark = pytest.mark.dist
RANKS, SIZE = 4, 2
NODES = pytest.mark.parametrize(("ranks", "size"), [(4, 2), (8, 2), (8, 4)])


def made(
    name: str, slots: TokenChoices = SLOTS, budget: Budget | None = None, size: int = SIZE
) -> Dispatcher:
    given: dict[str, Any] = dict(experts=EXPERTS, slots=slots, budget=budget or Budget(8.0, CPU))
    with pretended_nodes(size):
        return dispatcher_of(name, dist.group.WORLD, **given)


def rank_layers(cases: list[Case], size: int) -> list[Result]:
    rank, ranks, results = dist.get_rank(), dist.get_world_size(), []
    dispatcher = made("hier", size=size)
    for case in cases:
        results.append(run_layer(dispatcher, case, rank, ranks))
        again = run_layer(dispatcher, case, rank, ranks)
        assert all(map(torch.equal, results[-1], again)), "not deterministic"
    return results


def layers(cases: list[Case], ranks: int = RANKS, size: int = SIZE) -> list[Result]:
    """The whole layer over nodes of `size` ranks, for each case."""
    by_rank = run_distributed(rank_layers, ranks, cases, size)
    return [Result(*map(torch.cat, zip(*r, strict=True))) for r in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_dense_statement(dtype: torch.dtype) -> None:
    cases = [make_case(kind, dtype) for kind in ROUTINGS]
    for kind, case, result in zip(ROUTINGS, cases, layers(cases), strict=True):
        assert_near(result, case, kind)


@pytest.mark.parametrize(
    ("dtype", "ranks", "size"),
    [
        (torch.float32, 4, 2),
        *slow((torch.bfloat16, 4, 2), (torch.bfloat16, 8, 2), (torch.bfloat16, 8, 4)),
        pytest.param(torch.float32, 8, 2, marks=pytest.mark.slow),
        pytest.param(torch.float32, 8, 4, marks=pytest.mark.slow),
    ],
)
def test_exact_on_integers(dtype: torch.dtype, ranks: int, size: int) -> None:
    """Over two nodes of two and of four, and over four nodes; some that no token goes to."""
    cases = [make_case(kind, dtype, integer=True) for kind in ROUTINGS]
    for case, result in zip(cases, layers(cases, ranks, size), strict=True):
        assert_exact(result, case)


class Planned(NamedTuple):
    rows_SD: Tensor
    """Rows that the experts read."""
    row_prob_S: Tensor
    offsets: Tensor
    needed: Tensor
    row_index_S: Tensor
    inverse_NK: Tensor


def plans(case: Case, size: int) -> list[Planned]:
    """Rows of `alltoall` and `hier` on this rank."""
    tokens, found = TOKENS // dist.get_world_size(), []
    own = slice(dist.get_rank() * tokens, (dist.get_rank() + 1) * tokens)
    for name in ("alltoall", "hier"):
        received = made(name, TokenChoices(3, 4, 2), size=size).dispatch(
            case.x_TD[own], case.idx_TK[own], case.prob_TK[own]
        )
        p = received.plan
        rows = received.rows_ND.index_select(0, p.row_index_S)
        shown = (p.row_prob_S, p.offsets, p.needed, p.row_index_S, p.inverse_NK)
        found.append(Planned(rows, *shown))
    return found


def on_node(idx_TK: Tensor, node: int, nodes: int) -> Tensor:
    """Which of these ids are experts of a node."""
    return (idx_TK >= 0) & (idx_TK // (EXPERTS // nodes) == node)


def arrivals(case: Case, node: int, rows: int, ranks: int, size: int) -> Tensor:
    """Token of each received row on a node, int32; -1 for an empty row."""
    T, C = TOKENS // ranks, rows // ranks
    token_N = torch.full((size, ranks // size, C), -1, dtype=torch.int32)
    for rank in range(ranks):
        wanted_T = on_node(case.idx_TK[rank * T : (rank + 1) * T], node, ranks // size).any(1)
        tokens = rank * T + wanted_T.nonzero().flatten()
        token_N[rank % size, rank // size, : len(tokens)] = tokens
    return token_N.flatten()


@NODES
def test_expert_rows_are_those_of_collectives_bit_for_bit(ranks: int, size: int) -> None:
    """Rows lie in the order of (place, node, token of its block), and -1 is no expert."""
    case = make_case("even", torch.bfloat16)
    empty = torch.full((TOKENS, 1), -1, dtype=torch.int32)
    case = case._replace(
        idx_TK=torch.cat((case.idx_TK[:, :1], empty, case.idx_TK[:, 1:]), 1),
        prob_TK=torch.rand(TOKENS, 4, generator=torch.Generator().manual_seed(3)),
    )
    for rank, (flat, hier) in enumerate(run_distributed(plans, ranks, case, size)):
        token_N = arrivals(case, rank // size, len(hier.inverse_NK), ranks, size)
        used = int(flat.offsets[-1])
        assert used
        for name in ("row_prob_S", "offsets", "needed"):
            assert torch.equal(getattr(hier, name), getattr(flat, name)), name
        assert torch.equal(hier.rows_SD[:used], flat.rows_SD[:used])
        assert torch.equal(token_N[hier.row_index_S.long()][:used], flat.row_index_S[:used])
        inverse_NK = torch.where(token_N[:, None] < 0, -1, flat.inverse_NK[token_N.long()])
        assert torch.equal(hier.inverse_NK, inverse_NK)


def rank_sums(values: Tensor) -> Tensor:
    """Each rank adds a row of its own to every token, from its one expert of four."""
    dispatcher = made("hier", TokenChoices(RANKS, RANKS))
    idx = 2 * torch.arange(RANKS, dtype=torch.int32).expand(5, -1)
    x = torch.zeros(5, 2, dtype=torch.bfloat16)
    received = dispatcher.dispatch(x, idx, torch.ones(5, RANKS))
    return dispatcher.combine(values[dist.get_rank()].expand(20, 2).contiguous(), received)


def test_sums_inside_a_node_are_rounded_before_they_are_added_over_nodes() -> None:
    """(256 + 1) + (1 + 1): 257 rounds to 256, and 258 is a number of bf16.

    In fp32 over all ranks it would be 259, rounded to 260; in bf16 throughout 256 would stay."""
    values = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    for out in run_distributed(rank_sums, RANKS, values):
        assert torch.equal(out, torch.full((5, 2), 258.0, dtype=torch.bfloat16))
    values = torch.randn(4, 1, generator=torch.Generator().manual_seed(5)).bfloat16()
    inside = (values[0::2].float() + values[1::2].float()).bfloat16()
    want = (inside[0].float() + inside[1].float()).bfloat16().expand(5, 2)
    for out in run_distributed(rank_sums, RANKS, values):
        assert torch.equal(out, want)


def nodes_of_one(cases: list[Case]) -> None:
    """Nodes of one rank have nothing to add before the sum over nodes, as `alltoall`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    joined = nodes.join({tuple(range(ranks)): [str(r) for r in range(ranks)]})
    inside = Transport("alltoall", "a test")
    over_nodes = Transport("hier", "a test", inside=inside, nodes=joined)
    for case in cases:
        given: dict[str, Any] = dict(experts=EXPERTS, slots=SLOTS, budget=Budget(8.0, CPU))
        ours, theirs = (
            run_layer(make_dispatcher(way, group=dist.group.WORLD, **given), case, rank, ranks)
            for way in (over_nodes, inside)
        )
        for name, a, b in zip(Result._fields, ours, theirs, strict=True):
            assert torch.equal(a, b), name


@mostly_slow("ranks", [2, 4], 4)
def test_nodes_of_one_rank_equal_collectives_bit_for_bit(ranks: int) -> None:
    run_distributed(nodes_of_one, ranks, [make_case(kind, torch.bfloat16) for kind in ROUTINGS])


def overflow_and_rerun(case: Case) -> Rerun:
    budget = Budget(1.0, CPU)
    return rerun(made("hier", budget=budget), budget, case)


def small_blocks(case: Case) -> tuple[Rerun, Result]:
    """Blocks of a rank that were too small at first; results with blocks that have room."""
    budget = Budget(8.0, CPU)
    budget.blocks = Capacity(1.0, CPU)
    again = rerun(made("hier", budget=budget), budget, case)
    roomy = made("hier", budget=Budget(8.0, CPU))
    return again, run_layer(roomy, case, dist.get_rank(), dist.get_world_size())


def test_blocks_that_were_too_small_fit_when_run_again() -> None:
    """All tokens go to the first two of four nodes, where experts have room; the other two, which
    none wants, receive empty blocks. On average a node has experts of 9/14 of the tokens."""
    case = make_case("all to one rank", torch.bfloat16, tokens=512)
    for again, roomy in run_distributed(small_blocks, 8, case):
        assert again.overflowed == [True, False]
        (grown,) = again.grown
        assert grown.between_nodes
        assert grown[:2] == pytest.approx((14 / 9, 1.1 * 14 / 9))
        assert all(map(torch.equal, again.result, roomy))
        assert all(t.count_nonzero() for t in roomy[:3])


def test_an_overflowed_step_fits_when_run_again() -> None:
    case = make_case("all to one rank", torch.float32, tokens=512)
    overflowed, _, results = zip(*run_distributed(overflow_and_rerun, RANKS, case), strict=True)
    assert overflowed == ([True, False],) * RANKS
    for got, want in zip(map(torch.cat, zip(*results, strict=True)), dense(case), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def sent_inside(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and expert ids that the transport inside a node sends on this rank."""
    own, dispatcher = slice(dist.get_rank() * 6, dist.get_rank() * 6 + 6), made("hier")
    calls: list[tuple[Tensor, Tensor]] = []
    inside = dispatcher._inside  # type: ignore[attr-defined]
    send_tokens = inside.send_tokens

    def record(x: Tensor, idx: Tensor, *rest: Any) -> Any:
        calls.append((x, idx))
        return send_tokens(x, idx, *rest)

    inside.send_tokens = record
    dispatcher.dispatch(case.x_TD[own], case.idx_TK[own], case.prob_TK[own])
    return calls[0]


def test_inside_a_node_there_are_its_tokens_and_experts_alone() -> None:
    """Experts are counted from 0, as pushes go to the rank that an expert's number gives."""
    case = make_case("unequal", torch.bfloat16)
    for rank, (x, idx) in enumerate(run_distributed(sent_inside, RANKS, case)):
        node, place = divmod(rank, SIZE)
        token_B = arrivals(case, node, 6 * RANKS, RANKS, SIZE).view(SIZE, -1)[place].long()
        used = token_B >= 0
        assert torch.equal(x[used], case.x_TD[token_B[used]])
        ids = case.idx_TK[token_B]
        here = used[:, None] & on_node(ids, node, 2)
        assert torch.equal(idx, torch.where(here, ids % (EXPERTS // 2), -1))


def sent(case: Case, factor: float, fp8: bool) -> list[tuple[int, bool]]:
    """Bytes of this rank's collectives over its rail in both passes; False: not an all-to-all."""
    sizes: list[tuple[int, bool]] = []
    rank, nodes = dist.get_rank(), dist.get_world_size() // SIZE
    rail = [rank % SIZE + SIZE * n for n in range(nodes)]
    gather, exchange = dist.all_gather_into_tensor, dist.all_to_all_single

    def count(function: Any) -> Any:
        def called(out: Tensor, x: Tensor, group: Any) -> None:
            if dist.get_process_group_ranks(group) == rail:
                sizes.append((x.nbytes, function is exchange))
            function(out, x, group=group)

        return called

    T = len(case.x_TD) // dist.get_world_size()
    own = slice(rank * T, rank * T + T)
    recipe: dict[str, Any] = dict(recipe=Fp8Block(), fp8_rows=True) if fp8 else {}
    with pretended_nodes(SIZE):
        given: dict[str, Any] = dict(experts=EXPERTS, slots=SLOTS, budget=Budget(factor, CPU))
        dispatcher = dispatcher_of("hier", dist.group.WORLD, **given, **recipe)
    dist.all_gather_into_tensor, dist.all_to_all_single = count(gather), count(exchange)
    try:
        x_TD = case.x_TD[own].clone().requires_grad_()
        received = dispatcher.dispatch(x_TD, case.idx_TK[own], case.prob_TK[own])
        dispatcher.combine(received.rows_ND.clone(), received).backward(case.dout_TD[own])
    finally:
        dist.all_gather_into_tensor, dist.all_to_all_single = gather, exchange
    return sizes


@pytest.mark.parametrize("fp8", [False, True])
def test_a_token_crosses_the_network_once_to_each_node_with_its_experts(fp8: bool) -> None:
    """One block of C rows for each of four nodes: in FP8 to experts, and in bf16 back. Three of
    eight experts are on a node of two with a probability of 9/14."""
    case = make_case("even", torch.bfloat16, tokens=8 * 70)
    rows = 45
    there = row_bytes(HIDDEN) if fp8 else 2 * HIDDEN
    sizes = [3 * 8, there, 2 * HIDDEN, there, 2 * HIDDEN]
    want = [(4 * rows * size, True) for size in sizes]
    assert run_distributed(sent, 8, case, 1.0, fp8) == [want] * 8


def taken(size: int) -> tuple[str, str]:
    """Choice of `auto`, and the reason of `hier`."""
    with pretended_nodes(size):
        given: dict[str, Any] = dict(experts=EXPERTS, slots=SLOTS, budget=Budget(1.0, CPU))
        auto = type(dispatcher_of("auto", dist.group.WORLD, **given)).__name__
        try:
            return auto, type(dispatcher_of("hier", dist.group.WORLD, **given)).__name__
        except ValueError as error:
            return auto, str(error)


@pytest.mark.parametrize(
    ("size", "reason"),
    [(3, "the nodes hold 3, 1 ranks"), (4, "on one node")],
)
def test_nodes_that_do_not_fit_are_refused_and_auto_takes_collectives(
    size: int, reason: str
) -> None:
    for auto, told in run_distributed(taken, RANKS, size):
        assert auto == "AllToAll"
        assert reason in told and "set parallel.dispatch=auto" in told and "\n" not in told


def test_auto_takes_nodes_of_several_ranks() -> None:
    assert run_distributed(taken, RANKS, 2) == [("Hier", "Hier")] * RANKS


def on_this_host() -> tuple[str | None, str]:
    against = refuse("hier", dist.group.WORLD, torch.bfloat16)
    os.environ["PHALANX_NODE_GPUS"] = "two"
    try:
        nodes.names_here(dist.get_rank())
    except ValueError as error:
        return against, str(error)
    finally:
        del os.environ["PHALANX_NODE_GPUS"]
    return against, ""


def test_ranks_of_a_host_are_a_node() -> None:
    for against, told in run_distributed(on_this_host, 2):
        assert against == "all ranks are on one node"
        assert told.startswith("PHALANX_NODE_GPUS=two must be a number")


def test_ranks_of_a_node_must_follow_one_another() -> None:
    assert nodes.refuse("aabb") is None
    assert nodes.refuse("abab") == "the ranks of a node do not follow one another"


def groups_of_eight() -> tuple[int, int, list[int], list[int]]:
    """Two expert-parallel groups of four."""
    halves = [dist.new_group(ranks) for ranks in (range(4), range(4, 8))]
    group = halves[dist.get_rank() // 4]
    with pretended_nodes(2):
        found = choose_transport("hier", group, torch.bfloat16).nodes
    assert found is not None
    members = (dist.get_process_group_ranks(g) for g in (found.inside, found.rail))
    return found.count, found.index, *members


def test_groups_of_a_larger_job() -> None:
    for rank, (count, index, inside, rail) in enumerate(run_distributed(groups_of_eight, 8)):
        first, place = rank // 4 * 4, rank % 2
        assert (count, index) == (2, rank % 4 // 2)
        assert inside == [rank - place, rank - place + 1]
        assert rail == [first + place, first + place + 2]
