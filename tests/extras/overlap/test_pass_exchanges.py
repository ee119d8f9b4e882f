"""Exchanges of `symm` for each kind of pass, where two passes exchange at a time."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.overlap.passes import TWO_PASSES
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.sm90.exchange.peer_buffers import ExchangeOptions
from phalanx.parallel.dispatcher.collectives import IN_TURN
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport_class import Transport
from tests.parallel.dispatcher.gloo_exchange import experts, gloo_exchanges
from tests.parallel.dispatcher.test_fp8_rows import Given, dispatcher_of, drawn
from tests.support.distributed import run_distributed

ROUNDS = 3


def crossed(given: Given, options: SymmOptions, fp8_rows: bool) -> tuple[list[Tensor], list[int]]:
    """Results of calls of which each goes forward before the one before it goes backward, and the
    number of transfers of each exchange."""
    recipe, results = Fp8Block() if fp8_rows else None, list[Tensor]()
    spec = MLPSpec(Activation("swiglu"), "torch", recipe=recipe)
    passes = TWO_PASSES if options.two_passes else IN_TURN
    with gloo_exchanges() as exchanges:
        dispatcher = dispatcher_of(
            Transport("symm", "", passes=passes), recipe, fp8_rows, backend="torch", symm=options
        )

        def forward(number: int) -> tuple[list[Tensor], Tensor]:
            leaves = [t.clone().requires_grad_() for t in (given.x_TD.roll(number, 0), *given[1:4])]
            received = dispatcher.dispatch(leaves[0], given.idx_TK, leaves[1])
            out = experts(received, MLPWeights(*leaves[2:]), spec)
            return leaves, dispatcher.combine(out, received)

        def backward(leaves: list[Tensor], out: Tensor) -> None:
            results.extend([out.detach(), *torch.autograd.grad(out, leaves, given.dout_TD)])

        before = forward(0)
        for number in range(1, ROUNDS):
            after = forward(number)
            backward(*before)
            before = after
        backward(*before)
        return results, [len(exchange.sent) for exchange in exchanges]


def check(fp8_rows: bool) -> None:
    given = drawn(dist.get_rank(), dist.get_world_size())
    one, (all_transfers,) = crossed(given, SymmOptions(), fp8_rows)
    two, transfers = crossed(given, SymmOptions(comm_sms=8, two_passes=True), fp8_rows)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    # Tokens and sums; their gradients, and tokens once more.
    assert transfers == [2 * ROUNDS, 3 * ROUNDS]
    assert all_transfers == sum(transfers)


@pytest.mark.dist
@pytest.mark.parametrize("fp8_rows", [False, True])
def test_each_kind_of_pass_has_an_exchange(fp8_rows: bool) -> None:
    run_distributed(check, 2, fp8_rows)


def test_two_passes_leave_each_other_sms() -> None:
    """No push takes all SMs, and no kernel that computes waits for a part of an exchange."""
    options = ExchangeOptions(comm_sms=8, two_passes=True)
    assert options.overlaps and not options.in_waves
    assert options.sms(torch.device("cuda"), all_sms=True) == 8
    assert ExchangeOptions(comm_sms=8).in_waves
