"""Suite `between`: a layer over nodes, and the part of its exchanges that both passes wait for.

The layer is that of suite `layer`, on nodes of one GPU or more, by `hier` and by `alltoall`. Weight
gradients are added to fp32 buffers and wait for the next exchange of the backward pass, as in
training (`kernels.wgrad_queue`). The exposed part of the exchanges is the time of the layer less
that of the same experts without an exchange, over the time of dispatch and combine, forward and
backward, alone. Planning and packing rows count as exchange.

PHALANX_WIRE paces exchanges between pretended nodes of one host (`extras.overlap.paced`).

Legend: T tokens of a rank, D hidden, K experts of a token, N received rows.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.configs.schema import ParallelConfig
from phalanx.kernels import wgrad_queue
from phalanx.parallel.dispatcher.base import Dispatcher
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport import choose_transport
from phalanx.parallel.dispatcher.transport_class import Received, Transport
from phalanx.scripts.lab.bench.dispatch.ends import (
    ALL_SMS,
    Inputs,
    all_ranks,
    dispatcher,
    hier_of_nodes,
)
from phalanx.scripts.lab.bench.dispatch.whole import ALONE, Layer, fitted
from phalanx.scripts.lab.bench.models import BETWEEN_TARGETS, BETWEEN_TOKENS, DEEPSEEK, Model
from phalanx.scripts.lab.bench.problems import BF16, error
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, differing, passes

_ROUTING = "random"
_ENDS = ("dispatch", "combine")
_ROUNDING = 0.01
"""Error of results of `hier` in nodes of several ranks, whose sums are rounded once more."""


def between(bench: Bench, model: Model, tokens: int) -> list[Record]:
    shape, hier = model.shape(tokens), hier_of_nodes(bench)
    if isinstance(hier, str):
        return [Record("between", shape, "-", "-", bench.mode, note=hier)]
    assert hier.nodes is not None
    fitted_model, timings = fitted(bench, model), bench.timings("between", shape)
    problem = Layer(bench, fitted_model, all_ranks(), accumulate=True)
    batch = problem.batch(_ROUTING, tokens)
    transports = {"hier": hier, "alltoall": choose_transport("alltoall", all_ranks(), BF16)}
    cases = list(_without_exchange(problem, batch))
    for side, transport in transports.items():
        cases += _layer(problem, side, transport, batch, exact=hier.nodes.size == 1)
        cases += _exchanges(side, _dispatcher(problem, transport, batch, ALL_SMS), batch)
    fewer = f"{fitted_model.experts} of {model.experts} experts"
    note = fewer if fitted_model.experts < model.experts else ""
    records = timings.measure([replace(case, note=note) for case in cases])
    judged = bench.clock.device.type == "cuda" and (model, tokens) == (DEEPSEEK, BETWEEN_TOKENS)
    for side in transports:
        records += _exposed(timings, side, judged=judged and side == "hier")
    return records


def _dispatcher(
    problem: Layer, transport: str | Transport, batch: Inputs, exchange: SymmOptions
) -> Dispatcher:
    capacity = ParallelConfig().capacity_factor
    group = problem.group
    return dispatcher(
        transport, problem.bench, problem.model, batch, group, exchange, capacity_factor=capacity
    )


def _queued[Result](call: Callable[[], Result]) -> Callable[[], Result]:
    """A call whose weight gradients wait for exchanges, and have been computed at its end."""

    def run() -> Result:
        with wgrad_queue.opened(wgrad_queue.Waiting(exchanges=True)):
            result = call()
            wgrad_queue.run_all()
        return result

    return run


def _without_exchange(problem: Layer, batch: Inputs) -> Iterator[Case]:
    """The experts alone, whose weight gradients go the same way."""
    for case in problem.alone(batch, _ROUTING):
        assert case.call is not None
        yield replace(case, call=_queued(case.call))


def _layer(
    problem: Layer, side: str, transport: Transport, batch: Inputs, *, exact: bool
) -> Iterator[Case]:
    """Both passes of the layer, checked against `alltoall`: bit for bit if `exact`."""
    reference = _dispatcher(problem, "alltoall", batch, ALL_SMS)
    out_TD = problem.forward(reference, batch).detach()
    gradients = problem.both(reference, batch)[:2]
    ours = _dispatcher(problem, transport, batch, problem.bench.exchange)
    forward = functools.partial(problem.forward, ours, batch)
    both = functools.partial(problem.both, ours, batch)
    unequal = differing if exact or side == "alltoall" else _far
    checks = (
        lambda out: unequal([out], [out_TD], ["out"]),
        lambda got: unequal(got[:2], gradients, problem.names[:2]),
    )
    timed = passes(side, _queued(forward), _queued(both))
    for case, check in zip(timed, checks, strict=True):
        yield replace(case, check=check)


def _far(found: Sequence[Any], expected: Sequence[Any], names: Sequence[str]) -> str:
    """Name the results that differ by more than a rounding; empty if none does."""
    pairs = zip(names, found, expected, strict=True)
    wrong = [name for name, a, b in pairs if not error(a, b) < _ROUNDING]
    return f"large errors in {', '.join(wrong)}" if wrong else ""


def _exchanges(side: str, transport: Dispatcher, batch: Inputs) -> Iterator[Case]:
    """Dispatch and combine alone, each forward, and forward and backward."""
    inputs = batch.x_TD, batch.idx_TK, batch.prob_TK
    with torch.no_grad():
        received = transport.dispatch(*inputs)
    out_ND = torch.randn_like(received.rows_ND).requires_grad_()
    drows_ND = torch.randn_like(received.rows_ND)
    dprob_S = torch.randn_like(_outputs(received)[1])

    def dispatch_both() -> tuple[Tensor, ...]:
        outputs = _outputs(transport.dispatch(*inputs))
        return torch.autograd.grad(outputs, [batch.x_TD, batch.prob_TK], [drows_ND, dprob_S])

    def combine() -> Tensor:
        return transport.combine(out_ND, received)

    def combine_both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(combine(), out_ND, batch.dout_TD)

    calls = (lambda: transport.dispatch(*inputs), dispatch_both), (combine, combine_both)
    for name, (forward, both) in zip(_ENDS, calls, strict=True):
        yield Case(side, name, forward)
        yield Case(side, f"{name} both", both, report=f"{name} backward")


def _outputs(received: Received) -> list[Tensor]:
    assert received.plan.row_prob_S is not None
    return [received.rows_ND, received.plan.row_prob_S]


def _exposed(timings: Timings, side: str, *, judged: bool) -> list[Record]:
    """The parts of the exchanges that the forward pass, and that both passes, wait for."""
    head = (timings.suite, timings.shape, side)
    records = []
    for name, suffixes in (("forward", ("",)), ("both", ("", " backward"))):
        layer_passes = ("forward", "backward")[: len(suffixes)]
        layer = _ms(timings, side, layer_passes)
        alone = _ms(timings, f"{ALONE}, {_ROUTING}", layer_passes)
        exchanges = _ms(timings, side, [f"{end}{suffix}" for end in _ENDS for suffix in suffixes])
        if layer is None or alone is None or exchanges is None:
            continue
        waited = layer - alone
        share = waited / exchanges
        note = f"{share:.2f} of {exchanges:.3f} ms of exchanges"
        record = Record(*head, f"exposed, {name}", timings.bench.mode, waited, note=note)
        if judged and name == "both":
            must, goal = BETWEEN_TARGETS
            ratio, note = must / max(share, 0.01), f"{note}, asked {must}"
            record = replace(record, ratio=ratio, bar=1.0, goal=must / goal, note=note)
        records.append(record)
    return records


def _ms(timings: Timings, side: str, pass_names: Sequence[str]) -> float | None:
    times = [timings.time(side, name) for name in pass_names]
    known = [time.ms for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None
