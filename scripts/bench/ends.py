"""A layer's inputs on a rank, and the transports that take them to its experts.

Legend: T tokens of a rank, D hidden, K experts of a token, N received rows.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatcher.base import Dispatcher, Slots, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.clones import Clones
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.received import Received
from phalanx.parallel.dispatcher.transport import choose_transport
from phalanx.scripts.bench.measure import reason
from phalanx.scripts.bench.models import Model
from phalanx.scripts.bench.problems import BF16, random
from phalanx.scripts.bench.ranks import RankBench, RankSides, differing
from phalanx.scripts.bench.routing import fullest, probabilities

TIMEOUT = 120
"""Seconds before a rank that does not come ends the run."""
ROOM = 1.25
"""Least capacity factor."""
_SCALE = 0.2
PLAN_NAMES = ("row_index", "row_prob", "offsets", "inverse", "needed")


class Inputs(NamedTuple):
    """What a rank brings, and the gradient of what it gets."""

    x_TD: Tensor
    idx_TK: Tensor
    prob_TK: Tensor
    dout_TD: Tensor


def inputs(bench: RankBench, model: Model, idx_TK: Tensor) -> Inputs:
    """Random tokens (differentiable, as the probabilities are) for a routing."""
    tokens, device = len(idx_TK), bench.clock.device
    torch.manual_seed(1 + bench.rank)
    x, dout = (random(tokens, model.hidden, device=device, scale=_SCALE) for _ in range(2))
    prob = probabilities(tokens, model.top_k, rank=bench.rank, device=device)
    return Inputs(x.requires_grad_(), idx_TK, prob.requires_grad_(), dout)


def dispatcher(
    name: str,
    bench: RankBench,
    model: Model,
    given: Inputs,
    group: dist.ProcessGroup,
    comm_sms: int = 0,
    clones: Clones | None = None,
    recipe: Fp8Block | None = None,
    *,
    fp8_rows: bool = True,
) -> Dispatcher:
    """A transport with room for every token of this routing, to experts of a recipe if there is
    one, which rows then travel in unless `fp8_rows` is false.

    Raises:
        ValueError: it cannot run.
    """
    factor = max(ROOM, fullest(given.idx_TK, model.experts, group))
    return make_dispatcher(
        replace(choose_transport(name, group, BF16), clones=clones),
        group=group,
        experts=model.experts,
        slots=Slots(model.top_k, model.top_k),
        budget=Budget(factor, bench.clock.device),
        backend=bench.backend,
        symm=SymmOptions(comm_sms=comm_sms, timeout=TIMEOUT),
        recipe=recipe,
        fp8_rows=fp8_rows and recipe is not None,
    )


def transports(
    sides: RankSides,
    model: Model,
    given: Inputs,
    group: dist.ProcessGroup,
    label: str,
    comm_sms: int = 0,
) -> dict[str, Dispatcher]:
    """Those that were asked for, by name; why one cannot run is noted.

    Without `comm_sms` an exchange has all SMs, and is over when it returns.
    """
    bench, found = sides.bench, {}
    for name in bench.transports:
        try:
            found[name] = dispatcher(name, bench, model, given, group, comm_sms)
        except ValueError as error:
            why = reason(error).removeprefix("ValueError: ")
            sides.lose(f"{name}, {label}", "-", bench.mode, why, failed=bench.demanded)
    return found


class Ends:
    """Dispatch and combine of a routing, with the results of `alltoall` to compare with.

    Args:
        sides: where they take part. given: of this rank. group: expert-parallel.
    """

    def __init__(
        self, sides: RankSides, model: Model, given: Inputs, group: dist.ProcessGroup
    ) -> None:
        self._sides, self._given = sides, given
        exact = dispatcher("alltoall", sides.bench, model, given, group)
        received = exact.dispatch(given.x_TD, given.idx_TK, given.prob_TK)
        # Other rows are never read, and what a transport makes of them is its own business.
        self._read_N = (received.plan.inverse_NK >= 0).any(1)
        rows_ND = received.rows_ND.detach()
        self._out_ND = torch.randn_like(rows_ND).mul_(self._read_N[:, None]).requires_grad_()
        self._drows_ND = torch.randn_like(rows_ND).mul_(self._read_N[:, None])
        self._dprob_S = torch.randn_like(received.plan.row_prob_S)
        self._received = self._tensors(received)
        self._gradients = self._dispatch_backward(received)
        out_TD = exact.combine(self._out_ND, received)
        self._sums_TD = out_TD.detach()
        (grad_ND,) = torch.autograd.grad(out_TD, self._out_ND, given.dout_TD)
        self._dout_ND = grad_ND[self._read_N]

    def take_part(self, side: str, transport: Dispatcher, *, backward: bool = True) -> None:
        """Add `dispatch` and `combine` of a transport as sides `<side>`, forward and both."""
        given, take = self._given, self._sides.take
        self._sides.bench.clock.meet()
        with torch.no_grad():  # a graph that lives on would tie captured backwards to this stream
            kept = self._dispatch(transport)
        passes: list[tuple[str, Callable, Callable]] = [
            ("dispatch", lambda: self._dispatch(transport), self._check_received),
            (
                "combine",
                lambda: transport.combine(self._out_ND, kept),
                lambda out: differing([out], [self._sums_TD], ["sums"]),
            ),
        ]
        if backward:
            passes += [
                (
                    "dispatch both",
                    lambda: self._dispatch_backward(self._dispatch(transport)),
                    lambda got: differing(got, self._gradients, ["dx", "dprob"]),
                ),
                (
                    "combine both",
                    lambda: torch.autograd.grad(
                        transport.combine(self._out_ND, kept), self._out_ND, given.dout_TD
                    ),
                    lambda got: differing([got[0][self._read_N]], [self._dout_ND], ["gradient"]),
                ),
            ]
        for what, call, check in passes:
            take(side, what, call, check)

    def _dispatch(self, transport: Dispatcher) -> Received:
        return transport.dispatch(self._given.x_TD, self._given.idx_TK, self._given.prob_TK)

    def _dispatch_backward(self, received: Received) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            [received.rows_ND, received.plan.row_prob_S],
            [self._given.x_TD, self._given.prob_TK],
            [self._drows_ND, self._dprob_S],
        )

    def _tensors(self, received: Received) -> list[Tensor]:
        plan: ExpertPlan = received.plan
        return [received.rows_ND.detach()[self._read_N], *(t.detach() for t in plan[:5])]

    def _check_received(self, received: Received) -> str:
        return differing(self._tensors(received), self._received, ["rows", *PLAN_NAMES])
