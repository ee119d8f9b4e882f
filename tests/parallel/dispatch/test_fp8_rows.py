"""Rows that travel in FP8 give what rows give that the experts make FP8 when they have come."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.autograd import Arrived
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.packed import row_bytes
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatch.base import Slots, make_dispatcher
from phalanx.parallel.dispatch.capacity import Budget
from phalanx.parallel.dispatch.transport import choose_transport
from phalanx.parallel.dispatch.transport_class import DispatchContext
from tests.kernels.problems import error, make
from tests.support.distributed import run_distributed

T, D, F, E, K = 40, 160, 136, 4, 2


def layer(recipe: Fp8Block, fp8_rows: bool) -> tuple[list[Tensor], list[int]]:
    """Output, gradients of tokens, probabilities and weights; bytes of rows in collectives."""
    rank, sent = dist.get_rank(), []
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(T, D, generator=g).bfloat16().requires_grad_()
    prob = torch.rand(T, K, generator=g).requires_grad_()
    idx = torch.rand(T, E, generator=g).topk(K).indices.int()
    shapes = (E // 2, 2 * F, D), (E // 2, D, F)
    w1, w2 = ((torch.randn(s, generator=g) * 0.1).bfloat16().requires_grad_() for s in shapes)
    dispatcher = make_dispatcher(
        choose_transport("alltoall", dist.group.WORLD, torch.bfloat16),
        group=dist.group.WORLD,
        experts=E,
        slots=Slots(K, K),
        budget=Budget(2.0, torch.device("cpu")),
        recipe=recipe,
        fp8_rows=fp8_rows,
    )
    gather = dist.all_gather_into_tensor

    def counted(out: Tensor, given: Tensor, **how: Any) -> Any:
        if given.ndim == 2:
            sent.append(given.nbytes)
        return gather(out, given, **how)

    dist.all_gather_into_tensor = counted
    try:
        received = dispatcher.dispatch(x, idx, prob)
        spec = MLPSpec(Activation("swiglu"), "torch", recipe=recipe)
        out_ND = grouped_mlp(
            received.rows_ND, MLPWeights(w1, w2), received.plan, spec, arrived=received.arrived
        )
        out = dispatcher.combine(out_ND, received)
        out.backward(torch.randn(T, D, generator=g).bfloat16())
    finally:
        dist.all_gather_into_tensor = gather
    return [out.detach(), x.grad, prob.grad, w1.grad, w2.grad], sent


def _same_bits(recipe: Fp8Block) -> None:
    late, bytes_late = layer(recipe, False)
    early, bytes_early = layer(recipe, True)
    assert [torch.equal(a, b) for a, b in zip(early, late, strict=True)] == [True] * 5
    assert (bytes_late, bytes_early) == ([2 * T * D] * 2, [T * row_bytes(D)] * 2)


@pytest.mark.dist
@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Block(grad_format="e5m2", hidden="fp8")])
def test_the_bits_of_rows_that_are_quantised_later(recipe):
    run_distributed(_same_bits, 2, recipe)


def _weight_gradients_in_bf16() -> None:
    """Their operands are then the values that have come: x and the gradient of out in FP8."""
    recipe = Fp8Block(wgrad="bf16")
    late, early = (layer(recipe, fp8_rows)[0] for fp8_rows in (False, True))
    assert [torch.equal(a, b) for a, b in zip(early[:3], late[:3], strict=True)] == [True] * 3
    assert all(1e-2 < error(a, b) < 6e-2 for a, b in zip(early[3:], late[3:], strict=True))


@pytest.mark.dist
def test_weight_gradients_in_bf16_read_what_has_come():
    run_distributed(_weight_gradients_in_bf16, 2)


def test_without_a_recipe_nothing_takes_rows_in_fp8():
    p = make(Activation("swiglu"), torch.bfloat16)
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)
    with pytest.raises(ValueError, match="only a recipe"):
        grouped_mlp(p.x, MLPWeights(p.w1, p.w2), plan, MLPSpec(p.act, "torch"), arrived=Arrived())


@pytest.mark.parametrize("recipe", [None, Fp8Block()])
@pytest.mark.parametrize("fp8_rows", [False, True])
def test_experts_begin_with_the_rows_that_are_there_unless_they_quantize_them(recipe, fp8_rows):
    context = DispatchContext(None, None, None, 2, 2, "fused")
    given = context._replace(
        recipe=recipe if fp8_rows else None, quantizes=recipe is not None and not fp8_rows
    )
    assert given.waits == (recipe is None or fp8_rows)
    assert not given._replace(backend="torch").waits
