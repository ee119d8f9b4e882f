"""Suites `clones` and `rows`: uneven routing with copies of hot experts or none, and rows in FP8.

`clones` runs the layers of `layer`, without a shared expert and with gradients of weights added to
fp32 buffers, over `symm`. Every time is compared with balanced routing without clones. Slots are
two of a rank; where all tokens go to one rank's experts, as many as spread these over all ranks.
Copies cost what a run takes them to cost (`<slots> slots`), or nothing but the rows of each
(`<slots> slots, any`).
"""

import functools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.quantize.quantize import quantize_rows
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatcher.base import Dispatcher
from phalanx.parallel.dispatcher.clones import Clones, Costs, costs_of_copies, rates_on
from phalanx.parallel.dispatcher.received import Received
from phalanx.parallel.dispatcher.transport import refuse
from phalanx.scripts.bench.ends import Inputs, dispatcher, inputs
from phalanx.scripts.bench.models import CLONES_ASKED, ROWS_ASKED, Model
from phalanx.scripts.bench.problems import BF16
from phalanx.scripts.bench.ranks import RankBench, differing
from phalanx.scripts.bench.records import Record
from phalanx.scripts.bench.routing import KINDS, UNEVEN, fullest, routed, uneven
from phalanx.scripts.bench.whole import Layer, fitted

_SLOTS = 2
_WIDTH = 2
"""Bytes of a weight on its way to a guest slot."""


def clones(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    model = model._replace(shared=0)
    whole, shape = fitted(bench, model), model.shape(tokens)
    if why := _cannot(bench):
        return [Record("clones", shape, "-", "-", bench.mode, note=why)]
    sides, taking = bench.sides("clones", shape), []
    problem = Layer(bench, whole, dist.group.WORLD, accumulate=True)
    local = whole.experts // bench.ranks
    for kind in UNEVEN:
        where = dict(rank=bench.rank, device=bench.clock.device)
        idx = uneven(kind, tokens, whole.experts, whole.top_k, **where)
        given = inputs(bench, whole, idx)
        load = fullest(idx, whole.experts, dist.group.WORLD)
        plain = _dispatcher(bench, whole, given, None)
        results = [problem.forward(plain, given).detach(), *problem.both(plain, given)[:2]]
        slots = local - local // bench.ranks if kind == "one rank" else _SLOTS
        costs = _costs(bench, whole)
        as_run = Clones(slots, costs.copy, least=costs.any)
        ways = {"without clones": plain}
        for label, of in (("", as_run), (", any", replace(as_run, least=0))):
            ways[f"{slots} slots{label}"] = _dispatcher(bench, whole, given, of)
        for label, transport in ways.items():
            side = f"{kind}, {label}"
            taking.append((kind, side, load))
            forward = functools.partial(problem.forward, transport, given)
            both = functools.partial(problem.both, transport, given)
            sides.take(side, "forward", forward, functools.partial(_wrong, results[:1]))
            sides.take(side, "both", both, functools.partial(_wrong, results[1:]))
    sides.run()
    fewer = f", {whole.experts} of {model.experts} experts" if whole != model else ""
    made = []
    for kind, side, load in taking:
        for what in ("forward", "both"):
            balanced = sides.time(taking[0][1], what)
            cloned = what == "both" and side.endswith("slots")
            made += sides.record(
                side,
                what,
                other=balanced and balanced.ms,
                bars=CLONES_ASKED.get(kind) if cloned else None,
                note=f"load {load:.2f}{fewer}",
            )
    return made + sides.lost


def rows(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    """Dispatch of rows that are quantised first, against rows in bf16; and these quantised last:
    until all have come, with as many SMs as beside experts. Then a layer of FP8 experts with rows
    of either kind, as of the suite `clones`."""
    shape = model.shape(tokens)
    if why := _cannot(bench):
        return [Record("rows", shape, "-", "-", bench.mode, note=why)]
    sides, made = bench.sides("rows", shape), []
    where_to = bench.transports[0], bench, model
    for kind in KINDS:
        where = dict(rank=bench.rank, device=bench.clock.device)
        given = inputs(bench, model, routed(kind, tokens, model.experts, model.top_k, **where))
        plain, fp8 = (
            dispatcher(*where_to, given, dist.group.WORLD, bench.comm_sms, recipe=recipe)
            for recipe in (None, Fp8Block())
        )

        def quantized(ready: Dispatcher = plain, given: Inputs = given) -> object:
            received = _dispatch(ready, given)
            return received, quantize_rows(received.rows_ND)

        sides.take(f"bf16, {kind}", "dispatch", functools.partial(_dispatch, plain, given))
        sides.take(f"bf16, then FP8, {kind}", "dispatch", quantized)
        sides.take(f"FP8, {kind}", "dispatch", functools.partial(_dispatch, fp8, given))
    sides.run()
    for kind in KINDS:
        time = sides.time(f"bf16, {kind}", "dispatch")
        other = time and time.ms
        made += sides.record(f"bf16, {kind}", "dispatch")
        made += sides.record(f"bf16, then FP8, {kind}", "dispatch", other=other)
        made += sides.record(f"FP8, {kind}", "dispatch", other=other, bars=ROWS_ASKED)
    return made + sides.lost + _layer(bench, model._replace(shared=0), tokens)


def _layer(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    """Of FP8 experts, whose rows travel in bf16 or in FP8."""
    whole, sides = fitted(bench, model), bench.sides("rows", model.shape(tokens))
    problem = Layer(bench, whole, dist.group.WORLD, accumulate=True, recipe=Fp8Block())
    where = dict(rank=bench.rank, device=bench.clock.device)
    given = inputs(bench, whole, routed("random", tokens, whole.experts, whole.top_k, **where))
    sent = {"layer, rows in bf16": False, "layer, rows in FP8": True}
    for side, fp8_rows in sent.items():
        transport = dispatcher(
            bench.transports[0],
            bench,
            whole,
            given,
            dist.group.WORLD,
            bench.comm_sms,
            recipe=Fp8Block(),
            fp8_rows=fp8_rows,
        )
        sides.take(side, "forward", functools.partial(problem.forward, transport, given))
        sides.take(side, "both", functools.partial(problem.both, transport, given))
    sides.run()
    made = []
    for side in sent:
        for what in ("forward", "both"):
            plain = sides.time("layer, rows in bf16", what)
            made += sides.record(side, what, other=plain and plain.ms)
    return made + sides.lost


def _wrong(expected: list[Tensor], found: Tensor | tuple[Tensor, ...]) -> str:
    """Why an output, or gradients of tokens and probabilities, have not the bits of no clones."""
    of = [found] if isinstance(found, Tensor) else found[: len(expected)]
    return differing(of, expected, ["out"] if isinstance(found, Tensor) else ["dx", "dprob"])


@torch.no_grad()
def _dispatch(ready: Dispatcher, given: Inputs) -> Received:
    received = ready.dispatch(given.x_TD, given.idx_TK, given.prob_TK)
    if received.overlap is not None:
        received.overlap.wait_rows()
    return received


def _cannot(bench: RankBench) -> str:
    if bench.ranks == 1:
        return "needs several ranks"
    return refuse(bench.transports[0], dist.group.WORLD, BF16) or ""


def _costs(bench: RankBench, model: Model) -> Costs:
    """Of copies in a run."""
    rates = rates_on(bench.clock.device, "h200")
    weights = 3 * model.hidden * model.ffn
    return costs_of_copies(rates, weights=weights, width=_WIDTH, keep=False)


def _dispatcher(bench: RankBench, model: Model, given: Inputs, of: Clones | None) -> Dispatcher:
    return dispatcher(
        bench.transports[0],
        bench,
        model,
        given,
        dist.group.WORLD,
        bench.comm_sms,
        of,
    )
