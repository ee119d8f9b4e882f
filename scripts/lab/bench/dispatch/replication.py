"""Suites `replication` and `rows`: uneven routing with and without replication, and FP8 rows.

`replication` runs the layers of `layer`, without a shared expert and with gradients of weights
added to fp32 buffers, over `symm`, against balanced routing. A rank has two replica slots; if all
tokens go to one rank's experts, as many as spread these over all ranks. Replicas are planned with a
training run's cost model (`<slots> slots`), or at the cost of their rows alone (`<slots> slots,
any`).
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.extras.replication.options import (
    CopyCosts,
    ReplicationOptions,
    copy_costs,
    rates_on,
)
from phalanx.kernels.quantize.quantize import quantize_rows
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatcher.base import Dispatcher
from phalanx.parallel.dispatcher.transport import refuse
from phalanx.parallel.dispatcher.transport_class import Received
from phalanx.scripts.lab.bench.dispatch.ends import Inputs, all_ranks, dispatcher, inputs
from phalanx.scripts.lab.bench.dispatch.whole import Layer, fitted
from phalanx.scripts.lab.bench.models import REPLICATION_TARGETS, ROWS_TARGETS, Model
from phalanx.scripts.lab.bench.problems import BF16
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.routing import KINDS, UNEVEN, fullest, routed, uneven
from phalanx.scripts.lab.bench.timing import Bench, Case, differing

_SLOTS = 2
_WIDTH = 2  # bytes of a weight when it is sent to a replica slot


def replication(bench: Bench, model: Model, tokens: int) -> list[Record]:
    model = model._replace(shared=0)
    fitted_model, shape = fitted(bench, model), model.shape(tokens)
    if why := _cannot(bench):
        return [Record("replication", shape, "-", "-", bench.mode, note=why)]
    cases, reference = list[Case](), f"{UNEVEN[0]}, without replication"
    fewer = f", {fitted_model.experts} of {model.experts} experts" if fitted_model != model else ""
    problem = Layer(bench, fitted_model, all_ranks(), accumulate=True)
    local = fitted_model.experts // bench.ranks
    for kind in UNEVEN:
        rank_device: dict[str, Any] = dict(rank=bench.rank, device=bench.clock.device)
        idx = uneven(kind, tokens, fitted_model.experts, fitted_model.top_k, **rank_device)
        batch = inputs(bench, fitted_model, idx)
        load = fullest(idx, fitted_model.experts, all_ranks())
        plain = _dispatcher(bench, fitted_model, batch, None)
        results = [problem.forward(plain, batch).detach(), *problem.both(plain, batch)[:2]]
        slots = local - local // bench.ranks if kind == "one rank" else _SLOTS
        costs = _costs(bench, fitted_model)
        as_run = ReplicationOptions(slots, costs.copy, least=costs.any)
        dispatchers = {"without replication": plain}
        for label, options in (("", as_run), (", any", replace(as_run, least=0))):
            dispatchers[f"{slots} slots{label}"] = _dispatcher(bench, fitted_model, batch, options)
        judged: dict[str, Any] = dict(against=reference, note=f"load {load:.2f}{fewer}")
        for label, transport in dispatchers.items():
            side, targets = f"{kind}, {label}", None
            if label.endswith("slots"):
                targets = REPLICATION_TARGETS.get(kind)
            forward = functools.partial(problem.forward, transport, batch)
            both = functools.partial(problem.both, transport, batch)
            first, second = (functools.partial(_wrong, r) for r in (results[:1], results[1:]))
            cases.append(Case(side, "forward", forward, check=first, **judged))
            cases.append(Case(side, "both", both, check=second, bars=targets, **judged))
    return bench.timings("replication", shape).measure(cases)


def rows(bench: Bench, model: Model, tokens: int) -> list[Record]:
    """Time a dispatch of FP8 rows against bf16 rows, and bf16 rows quantised on arrival.

    It ends when all rows have arrived, on as many SMs as beside experts. Then a layer of FP8
    experts, as in suite `replication`, with rows sent in either format.
    """
    shape = model.shape(tokens)
    if why := _cannot(bench):
        return [Record("rows", shape, "-", "-", bench.mode, note=why)]
    cases = []
    where_to = bench.transports[0], bench, model
    for kind in KINDS:
        rank_device: dict[str, Any] = dict(rank=bench.rank, device=bench.clock.device)
        batch = inputs(
            bench, model, routed(kind, tokens, model.experts, model.top_k, **rank_device)
        )
        plain, fp8 = (
            dispatcher(*where_to, batch, all_ranks(), bench.exchange, recipe=recipe)
            for recipe in (None, Fp8Block())
        )

        def quantized(ready: Dispatcher = plain, batch: Inputs = batch) -> object:
            received = _dispatch(ready, batch)
            return received, quantize_rows(received.rows_ND)

        send_bf16, send_fp8 = (functools.partial(_dispatch, t, batch) for t in (plain, fp8))
        judged: dict[str, Any] = dict(against=f"bf16, {kind}")
        cases.append(Case(f"bf16, {kind}", "dispatch", send_bf16))
        cases.append(Case(f"bf16, then FP8, {kind}", "dispatch", quantized, **judged))
        cases.append(Case(f"FP8, {kind}", "dispatch", send_fp8, bars=ROWS_TARGETS, **judged))
    records = bench.timings("rows", shape).measure(cases)
    return records + _layer(bench, model._replace(shared=0), tokens)


def _layer(bench: Bench, model: Model, tokens: int) -> list[Record]:
    fitted_model, cases = fitted(bench, model), []
    problem = Layer(bench, fitted_model, all_ranks(), accumulate=True, recipe=Fp8Block())
    rank_device: dict[str, Any] = dict(rank=bench.rank, device=bench.clock.device)
    batch = inputs(
        bench,
        fitted_model,
        routed("random", tokens, fitted_model.experts, fitted_model.top_k, **rank_device),
    )
    sent = {"layer, rows in bf16": False, "layer, rows in FP8": True}
    for side, fp8_rows in sent.items():
        transport = dispatcher(
            bench.transports[0],
            bench,
            fitted_model,
            batch,
            all_ranks(),
            bench.exchange,
            recipe=Fp8Block(),
            fp8_rows=fp8_rows,
        )
        judged: dict[str, Any] = dict(against="layer, rows in bf16")
        for name, run in (("forward", problem.forward), ("both", problem.both)):
            cases.append(Case(side, name, functools.partial(run, transport, batch), **judged))
    return bench.timings("rows", model.shape(tokens)).measure(cases)


def _wrong(expected: list[Tensor], result: Tensor | tuple[Tensor, ...]) -> str:
    """Name the results whose bits differ from those without replication; empty if none does."""
    results = [result] if isinstance(result, Tensor) else result[: len(expected)]
    return differing(results, expected, ["out"] if isinstance(result, Tensor) else ["dx", "dprob"])


@torch.no_grad()
def _dispatch(ready: Dispatcher, batch: Inputs) -> Received:
    received = ready.dispatch(batch.x_TD, batch.idx_TK, batch.prob_TK)
    if received.overlap is not None:
        received.overlap.wait_rows()
    return received


def _cannot(bench: Bench) -> str:
    if bench.ranks == 1:
        return "needs several ranks"
    return refuse(bench.transports[0], all_ranks(), BF16) or ""


def _costs(bench: Bench, model: Model) -> CopyCosts:
    rates = rates_on(bench.clock.device, "h200")
    weights = 3 * model.hidden * model.ffn
    return copy_costs(rates, weights=weights, width=_WIDTH, keep=False)


def _dispatcher(
    bench: Bench, model: Model, batch: Inputs, replication: ReplicationOptions | None
) -> Dispatcher:
    return dispatcher(
        bench.transports[0],
        bench,
        model,
        batch,
        all_ranks(),
        bench.exchange,
        replication,
    )
