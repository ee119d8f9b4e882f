"""Rows that travel in FP8 give what rows give that the experts make FP8 when they have come.

Tokens have two experts: a sum of two numbers has one order, so that transports that add ranks up
in orders of their own give the same bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.interfaces import Fp8Inputs
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.quantize import row_bytes
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.base import TokenChoices, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport import choose_transport
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Dispatcher, Transport
from tests.kernels.problems import error, make
from tests.parallel.dispatcher.gloo_exchange import experts, gloo_exchanges
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow
from tests.support.training import pretended_nodes

T, D, F, E, K = 40, 160, 136, 8, 2
DEFAULTS, OTHERS = Fp8Block(), Fp8Block(grad_format="e5m2", hidden="fp8")
RECIPES = [pytest.param(DEFAULTS, id="defaults"), pytest.param(OTHERS, id="e5m2 and hidden")]


class Given(NamedTuple):
    """A rank's tokens and experts."""

    x_TD: Tensor
    prob_TK: Tensor
    w1: Tensor
    w2: Tensor
    idx_TK: Tensor
    dout_TD: Tensor


def drawn(rank: int, ranks: int) -> Given:
    """The first experts get most, one gets nothing, and some slots are empty."""
    g = torch.Generator().manual_seed(rank)
    scores = torch.rand(T, E, generator=g) + torch.linspace(0.4, 0, E)
    scores[:, 2] = -1
    idx = scores.topk(K).indices.int()
    idx[torch.rand(T, K, generator=g) < 0.1] = -1
    shapes = (E // ranks, 2 * F, D), (E // ranks, D, F)
    w1, w2 = ((torch.randn(s, generator=g) * 0.1).bfloat16() for s in shapes)
    x, dout = (torch.randn(T, D, generator=g).bfloat16() for _ in range(2))
    return Given(x, torch.rand(T, K, generator=g), w1, w2, idx, dout)


def dispatcher_of(
    transport: Transport, recipe: Fp8Block | None, fp8_rows: bool = True, **how: Any
) -> Dispatcher:
    return make_dispatcher(
        transport,
        group=None if transport.name == "local" else dist.group.WORLD,
        experts=E,
        slots=TokenChoices(K, K),
        budget=Budget(8.0, torch.device("cpu")),
        recipe=recipe,
        fp8_rows=fp8_rows,
        connections=Connections(),
        **how,
    )


NAMES = "out", "dx", "dprob", "dw1", "dw2"


def layer(
    dispatcher: Dispatcher, given: Given, recipe: Fp8Block, times: int = 1, again: bool = False
) -> list[Tensor]:
    """Output, and gradients of tokens, probabilities and weights, the same every time.

    With `again` h is computed again.
    """
    x, prob, w1, w2 = leaves = [t.clone().requires_grad_() for t in given[:4]]
    spec = MLPSpec(Activation("swiglu"), "torch", recipe=recipe, recompute_h=again)
    results = []
    for _ in range(times):
        received = dispatcher.dispatch(x, given.idx_TK, prob)
        out = dispatcher.combine(experts(received, MLPWeights(w1, w2), spec), received)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, given.dout_TD)])
    for other in results[1:]:
        assert_same(other, results[0])
    return results[0]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    same = {n: torch.equal(a, b) for n, a, b in zip(NAMES, ours, theirs, strict=True)}
    assert all(same.values()), same


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of the rows that this rank gives to all-gathers."""
    gather, sent = dist.all_gather_into_tensor, list[int]()

    def called(out: Tensor, given: Tensor, **how: Any) -> Any:
        if given.ndim == 2:
            sent.append(given.nbytes)
        return gather(out, given, **how)

    dist.all_gather_into_tensor = called
    try:
        yield sent
    finally:
        dist.all_gather_into_tensor = gather


def over(name: str, size: int = 2) -> Transport:
    with pretended_nodes(size):
        return choose_transport(name, dist.group.WORLD, torch.bfloat16)


def both(name: str, recipe: Fp8Block, size: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """With rows in FP8, and with rows that the experts make FP8; the bytes of both are as said."""
    given, transport = drawn(dist.get_rank(), dist.get_world_size()), over(name, size)
    results, sent = [], []
    for fp8_rows in (True, False):
        with counted() as rows:
            results.append(layer(dispatcher_of(transport, recipe, fp8_rows), given, recipe))
        sent.append(rows)
    # Tokens, and in the backward pass gradients; inside a node blocks of T rows for each node.
    blocks = 1 if name == "alltoall" else dist.get_world_size() // size
    assert sent == [2 * [T * blocks * b] for b in (row_bytes(D), 2 * D)]
    return results[0], results[1]


def _same_bits(recipe: Fp8Block) -> None:
    assert_same(*both("alltoall", recipe))


@pytest.mark.dist
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_rows_that_are_quantised_later(recipe: Fp8Block) -> None:
    run_distributed(_same_bits, 2, recipe)


def check_pushed(recipe: Fp8Block, transport: Transport) -> None:
    """With and without pushes beside the experts, tokens kept or sent again."""
    given = drawn(dist.get_rank(), dist.get_world_size())
    wanted = layer(dispatcher_of(over("alltoall"), recipe), given, recipe)
    for sms, keep in ((0, False), (0, True), (8, False), (8, True)):
        options = SymmOptions(keep=keep, comm_sms=sms)
        with gloo_exchanges() as made:
            dispatcher = dispatcher_of(transport, recipe, symm=options)
            assert_same(layer(dispatcher, given, recipe, times=2), wanted)
        with gloo_exchanges():  # h by the first product once more, of the same tokens
            dispatcher = dispatcher_of(transport, recipe, symm=options)
            assert_same(layer(dispatcher, given, recipe, again=True), wanted)
        again = not keep
        small, whole = row_bytes(D), 2 * D
        (exchange,) = made
        assert exchange.sent == 2 * [small, whole, small, *again * [small], whole]


@pytest.mark.dist
@mostly_slow("recipe", [DEFAULTS, OTHERS], DEFAULTS)
def test_pushes_bring_the_same_bits(recipe: Fp8Block) -> None:
    """Into buffers that are used again, where nothing but what was wanted is a number."""
    run_distributed(check_pushed, 4, recipe, Transport("symm", "in this test"))


def check_weight_gradients_in_bf16(name: str) -> None:
    """Their operands are then the values that have come: x and the gradient of out in FP8."""
    early, late = both(name, Fp8Block(wgrad="bf16"))
    assert [torch.equal(a, b) for a, b in zip(early[:3], late[:3], strict=True)] == [True] * 3
    assert all(1e-2 < error(a, b) < 6e-2 for a, b in zip(early[3:], late[3:], strict=True))


@pytest.mark.dist
def test_weight_gradients_in_bf16_read_what_has_come() -> None:
    run_distributed(check_weight_gradients_in_bf16, 2, "alltoall")


def test_without_a_recipe_nothing_takes_rows_in_fp8():
    p = make(Activation("swiglu"), torch.bfloat16)
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)
    with pytest.raises(ValueError, match="only a recipe"):
        grouped_mlp(
            p.x, MLPWeights(p.w1, p.w2), plan, MLPSpec(p.act, "torch"), fp8_inputs=Fp8Inputs()
        )


@pytest.mark.parametrize("recipe", [None, Fp8Block()])
@pytest.mark.parametrize("fp8_rows", [False, True])
def test_experts_begin_with_the_rows_that_are_there_unless_they_quantize_them(recipe, fp8_rows):
    context = DispatchContext(None, None, None, 2, 2, 2, "fused")
    given = context._replace(
        recipe=recipe if fp8_rows else None, quantizes=recipe is not None and not fp8_rows
    )
    assert given.waits == (recipe is None or fp8_rows)
    assert not given._replace(backend="torch").waits
