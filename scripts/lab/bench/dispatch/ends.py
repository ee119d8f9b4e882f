"""A layer's inputs on a rank, and the transports to its experts.

Legend: T tokens of a rank, D hidden, K experts of a token, N received rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.replication.options import ReplicationOptions
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatcher import nodes
from phalanx.parallel.dispatcher.base import Dispatcher, TokenChoices, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport import choose_transport
from phalanx.parallel.dispatcher.transport_class import Received, Transport
from phalanx.scripts.lab.bench.models import Model
from phalanx.scripts.lab.bench.problems import BF16, random
from phalanx.scripts.lab.bench.routing import fullest, probabilities
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, differing, reason

TIMEOUT = 120  # seconds after which a missing rank ends the run
ALL_SMS = SymmOptions(timeout=TIMEOUT)  # all SMs, and no overlap
CAPACITY_FACTOR = 1.25  # least capacity factor, if no other is given
_SCALE = 0.2
PLAN_NAMES = ("row_index", "row_prob", "offsets", "inverse", "needed")


class Inputs(NamedTuple):
    """Inputs of a rank, and the gradient of its output."""

    x_TD: Tensor
    idx_TK: Tensor
    prob_TK: Tensor
    dout_TD: Tensor


def all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "no process group"
    return group


def inputs(bench: Bench, model: Model, idx_TK: Tensor) -> Inputs:
    """Random tokens (differentiable, as the probabilities are) for a routing."""
    tokens, device = len(idx_TK), bench.clock.device
    torch.manual_seed(1 + bench.rank)
    x, dout = (random(tokens, model.hidden, device=device, scale=_SCALE) for _ in range(2))
    prob = probabilities(tokens, model.top_k, rank=bench.rank, device=device)
    return Inputs(x.requires_grad_(), idx_TK, prob.requires_grad_(), dout)


def hier_of_nodes(bench: Bench) -> Transport | str:
    """The transport `hier` of all ranks, or why nothing crosses between nodes; collective."""
    names = bench.gather(nodes.names_here(bench.rank)[1])
    if refusal := nodes.refuse(names):
        one_host = bench.ranks > 1 and len(set(names)) == 1
        return f"{refusal}{': PHALANX_NODE_GPUS=1 makes a node of each GPU' * one_host}"
    return choose_transport("hier", all_ranks(), BF16)


def dispatcher(
    transport: str | Transport,
    bench: Bench,
    model: Model,
    batch: Inputs,
    group: dist.ProcessGroup,
    exchange: SymmOptions = ALL_SMS,
    replication: ReplicationOptions | None = None,
    recipe: Fp8Block | None = None,
    *,
    fp8_rows: bool = True,
    capacity_factor: float = CAPACITY_FACTOR,
) -> Dispatcher:
    """A dispatcher whose buffers hold every row of this routing, or ValueError.

    Args:
        transport: its name, or the choice itself.
        recipe: recipe of the experts; their rows are sent in FP8 unless `fp8_rows` is false.
        capacity_factor: least capacity factor.
    """
    factor = max(capacity_factor, fullest(batch.idx_TK, model.experts, group))
    if isinstance(transport, str):
        transport = choose_transport(transport, group, BF16)
    return make_dispatcher(
        replace(transport, replication=replication),
        group=group,
        experts=model.experts,
        slots=TokenChoices(model.top_k, model.top_k),
        budget=Budget(factor, bench.clock.device),
        backend=bench.backend,
        symm=exchange,
        recipe=recipe,
        fp8_rows=fp8_rows and recipe is not None,
        connections=bench.connections,
    )


def transports(
    timings: Timings,
    model: Model,
    batch: Inputs,
    group: dist.ProcessGroup,
    label: str,
    exchange: SymmOptions = ALL_SMS,
) -> dict[str, Dispatcher]:
    """Dispatchers of the requested transports by name; one that cannot run is noted as skipped."""
    bench, dispatchers = timings.bench, {}
    for name in bench.transports:
        try:
            dispatchers[name] = dispatcher(name, bench, model, batch, group, exchange)
        except ValueError as error:
            why = reason(error).removeprefix("ValueError: ")
            timings.skip(f"{name}, {label}", "-", bench.mode, why, failed=bench.demanded)
    return dispatchers


class ExchangeEnds:
    """Dispatch and combine of a routing, with the results of `alltoall` to compare with.

    `timings` notes what cannot run.
    """

    def __init__(
        self, timings: Timings, model: Model, batch: Inputs, group: dist.ProcessGroup
    ) -> None:
        self._clock, self._batch = timings.bench.clock, batch
        reference = dispatcher("alltoall", timings.bench, model, batch, group)
        received = reference.dispatch(batch.x_TD, batch.idx_TK, batch.prob_TK)
        # The contents of rows that no token reads are unspecified and not compared.
        prob_S, inverse_NK = received.plan.row_prob_S, received.plan.inverse_NK
        assert prob_S is not None and inverse_NK is not None
        self._read_N = (inverse_NK >= 0).any(1)
        rows_ND = received.rows_ND.detach()
        self._out_ND = torch.randn_like(rows_ND).mul_(self._read_N[:, None]).requires_grad_()
        self._drows_ND = torch.randn_like(rows_ND).mul_(self._read_N[:, None])
        self._dprob_S = torch.randn_like(prob_S)
        self._received = self._tensors(received)
        self._gradients = self._dispatch_backward(received)
        out_TD = reference.combine(self._out_ND, received)
        self._sums_TD = out_TD.detach()
        (grad_ND,) = torch.autograd.grad(out_TD, self._out_ND, batch.dout_TD)
        self._dout_ND = grad_ND[self._read_N]

    def cases(self, side: str, transport: Dispatcher, *, backward: bool = True) -> Iterator[Case]:
        """Dispatch and combine of a transport as side `side`, forward and backward."""
        batch = self._batch
        self._clock.align_ranks()
        with torch.no_grad():  # a live autograd graph would tie captured backwards to this stream
            received = self._dispatch(transport)

        def combine() -> Tensor:
            return transport.combine(self._out_ND, received)

        def dispatch_both() -> tuple[Tensor, ...]:
            return self._dispatch_backward(self._dispatch(transport))

        def combine_both() -> tuple[Tensor, ...]:
            return torch.autograd.grad(combine(), self._out_ND, batch.dout_TD)

        def check(names: Sequence[str], expected: list[Tensor]) -> Callable[[Any], str]:
            return lambda found: differing(found, expected, names)

        sums = check(["sums"], [self._sums_TD])
        gradient = check(["gradient"], [self._dout_ND])
        dispatch = Case(
            side, "dispatch", lambda: self._dispatch(transport), check=self._check_received
        )
        yield dispatch
        if backward:
            grads = check(["dx", "dprob"], list(self._gradients))
            back: dict[str, Any] = dict(report="dispatch backward", check=grads)
            yield Case(side, "dispatch both", dispatch_both, **back)
        yield Case(side, "combine", combine, check=lambda out: sums([out]))
        if backward:
            back = dict(report="combine backward")
            back["check"] = lambda got: gradient([got[0][self._read_N]])
            yield Case(side, "combine both", combine_both, **back)

    def _dispatch(self, transport: Dispatcher) -> Received:
        return transport.dispatch(self._batch.x_TD, self._batch.idx_TK, self._batch.prob_TK)

    def _dispatch_backward(self, received: Received) -> tuple[Tensor, ...]:
        prob_S = received.plan.row_prob_S
        assert prob_S is not None
        return torch.autograd.grad(
            [received.rows_ND, prob_S],
            [self._batch.x_TD, self._batch.prob_TK],
            [self._drows_ND, self._dprob_S],
        )

    def _tensors(self, received: Received) -> list[Tensor]:
        plan: ExpertPlan = received.plan
        return [
            received.rows_ND.detach()[self._read_N],
            *(t.detach() for t in plan[:5] if t is not None),
        ]

    def _check_received(self, received: Received) -> str:
        return differing(self._tensors(received), self._received, ["rows", *PLAN_NAMES])
