"""Suites `layer`, `flash`, `scaling` and `skew`: dispatch, experts, combine, with routing given.

What is measured is what `moe.layer` runs: a transport of `parallel.dispatch` and `moe.experts`.
Weight gradients are bf16. TFLOP/s count the rows of a rank's share, T * K.

Legend: T tokens of a rank, D hidden, K experts of a token, N received rows, S expert rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from phalanx.kernels.expert_mlp.dense_halves import FirstHalf, dense_first, dense_second
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.moe.experts import Experts
from phalanx.parallel.dispatcher.base import Dispatcher
from phalanx.scripts.bench.ends import Ends, Inputs, dispatcher, inputs, transports
from phalanx.scripts.bench.models import (
    EXPOSED_ASKED,
    FLASH,
    FLASH_TOKENS,
    GPUS,
    SCALING_ASKED,
    SKEW_ASKED,
    TOKENS,
    Model,
)
from phalanx.scripts.bench.problems import BF16
from phalanx.scripts.bench.ranks import RankBench, RankSides, differing
from phalanx.scripts.bench.records import Record
from phalanx.scripts.bench.routing import KINDS, routed, uneven

_W = 0.02
_COPIES, _SHARE = 5, 0.7
"""Weights, their gradients in graphs, in the eager call and to compare with (two kinds of routing);
and the share of the memory that they may take."""
ALONE = "experts alone"


def fitting(bench: RankBench, model: Model, memory: float) -> Model:
    """The layer, with half as many experts until their weights and gradients fit in `memory`."""
    matrices = 3 if model.activation.gated else 2
    while True:
        local = model.experts // bench.ranks
        fits = _COPIES * 2 * matrices * local * model.hidden * model.ffn <= _SHARE * memory
        if fits or local % 2 or model.experts // 2 < model.top_k:
            return model
        model = model._replace(experts=model.experts // 2)


def fitted(bench: RankBench, model: Model) -> Model:
    """The same for this device; and on fewer than `GPUS`, the experts of those that are there.

    The GEMMs of a GPU are then those that are asked about. What it sends is less.
    """
    if bench.clock.device.type != "cuda":
        return model
    ranks = min(bench.ranks, GPUS)
    model = model._replace(experts=max(model.experts * ranks // GPUS, model.top_k))
    return fitting(bench, model, torch.cuda.get_device_properties(bench.clock.device).total_memory)


class Layer:
    """The experts of this rank in a group, and passes of the layer over them.

    With `accumulate` gradients of parameters are added to fp32 buffers, not returned; with a recipe
    experts compute by it, and keep their weights in FP8.
    """

    def __init__(
        self,
        bench: RankBench,
        model: Model,
        group: dist.ProcessGroup,
        *,
        accumulate: bool = False,
        recipe: Fp8Block | None = None,
    ) -> None:
        self.bench, self.model, self.group = bench, model, group
        config = TransformerConfig(
            num_layers=1,
            num_attention_heads=1,
            hidden_size=model.hidden,
            num_moe_experts=model.experts,
            moe_ffn_hidden_size=model.ffn,
            add_bias_linear=model.biases,
            bf16=True,
            params_dtype=BF16,
            perform_initialization=False,
        )
        how = dict(accumulate=accumulate, recipe=recipe, keep_fp8=recipe is not None)
        self.spec = MLPSpec(model.activation, bench.backend, **how)
        self.experts = Experts(
            config=config,
            spec=self.spec,
            pg_collection=ProcessGroupCollection(ep=group, expt_dp=group),
        )
        self.parameters = list(self.experts.parameters())
        self.names = ["dx", "dprob", *(f"d{name}" for name, _ in self.experts.named_parameters())]
        self.shared: list[Tensor] = []
        if model.shared:
            H = (2 if model.activation.gated else 1) * model.shared
            shapes = ((H, model.hidden), (model.hidden, model.shared))
            device = bench.clock.device
            self.shared = [torch.empty(s, dtype=BF16, device=device) for s in shapes]
            self.parameters += [w.requires_grad_() for w in self.shared]
            self.names += ["dshared1", "dshared2"]
        torch.manual_seed(1 + bench.rank)
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.normal_(std=_W)
                if accumulate:
                    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

    def beside(self, given: Inputs) -> Tensor:
        """What the shared expert makes of this rank's tokens."""
        w1, w2 = self.shared
        return dense_second(dense_first(given.x_TD, w1, self.spec), w2, self.spec)

    def forward(self, transport: Dispatcher, given: Inputs) -> Tensor:
        if not self.shared:
            received = transport.dispatch(given.x_TD, given.idx_TK, given.prob_TK)
            return transport.combine(self.experts(received), received)
        w1, w2 = self.shared
        made: list[FirstHalf] = []  # by the first half of the shared expert

        def first() -> None:
            made.append(dense_first(given.x_TD, w1, self.spec))

        received = transport.dispatch(given.x_TD, given.idx_TK, given.prob_TK, first)
        out_ND = self.experts(received)
        return transport.combine(out_ND, received, lambda: dense_second(*made, w2, self.spec))

    def both(self, transport: Dispatcher, given: Inputs) -> tuple[Any, ...]:
        """Gradients of inputs and parameters; None of those that are added to buffers."""
        leaves = [given.x_TD, given.prob_TK, *self.parameters]
        out_TD = self.forward(transport, given)
        added = self.spec.accumulate
        return torch.autograd.grad(out_TD, leaves, given.dout_TD, allow_unused=added)

    def take_part(
        self, sides: RankSides, given: Inputs, label: str, *, backward: bool
    ) -> list[str]:
        """Every transport as a side `<transport>, <label>`, compared with `alltoall`; the names."""
        exact = dispatcher("alltoall", self.bench, self.model, given, self.group)
        out_TD = self.forward(exact, given).detach()
        gradients = self.both(exact, given) if backward else ()
        found = []
        ready = transports(sides, self.model, given, self.group, label, self.bench.comm_sms)
        for name, transport in ready.items():
            side = f"{name}, {label}"
            found.append(side)
            sides.take(
                side,
                "forward",
                functools.partial(self.forward, transport, given),
                lambda out: differing([out], [out_TD], ["out"]),
            )
            if backward:
                sides.take(
                    side,
                    "both",
                    functools.partial(self.both, transport, given),
                    lambda got: differing(got, gradients, self.names),
                )
        return found

    def alone(self, sides: RankSides, given: Inputs, label: str) -> str:
        """All experts, on rows that are there already, as a side; its name."""
        exact = dispatcher("alltoall", self.bench, self.model, given, self.group)
        with torch.no_grad():
            received = exact.dispatch(given.x_TD, given.idx_TK, given.prob_TK)
        plan = received.plan
        prob_S = plan.row_prob_S.clone().requires_grad_()
        rows_ND = received.rows_ND.requires_grad_()
        ready = received._replace(rows_ND=rows_ND, plan=plan._replace(row_prob_S=prob_S))
        dout = [torch.randn_like(rows_ND), given.dout_TD][: 2 if self.shared else 1]
        leaves = [rows_ND, prob_S, given.x_TD, *self.parameters]

        def forward() -> list[Tensor]:
            out_ND = self.experts(ready)
            return [out_ND, self.beside(given)] if self.shared else [out_ND]

        def both() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(forward(), leaves, dout, allow_unused=True)

        side = f"{ALONE}, {label}"
        sides.take(side, "forward", forward)
        sides.take(side, "both", both)
        return side

    def given(self, kind: str, tokens: int) -> Inputs:
        """Inputs of a kind of routing, for this rank of the layer's group."""
        m, where = self.model, dict(rank=self.group.rank(), device=self.bench.clock.device)
        return inputs(self.bench, m, routed(kind, tokens, m.experts, m.top_k, **where))


def layer(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    whole, shape = fitted(bench, model), model.shape(tokens)
    sides, taking, ends = bench.sides("layer", shape), [], []
    problem = Layer(bench, whole, dist.group.WORLD)
    for kind in KINDS:
        given = problem.given(kind, tokens)
        taking += problem.take_part(sides, given, kind, backward=True)
        if model.exposed and bench.ranks > 1 and kind == KINDS[0]:
            alone, ends = problem.alone(sides, given, kind), list(taking)
            two = Ends(sides, whole, given, dist.group.WORLD)
            for name, transport in transports(sides, whole, given, dist.group.WORLD, kind).items():
                two.take_part(f"{name}, {kind}", transport, backward=False)
    sides.run()
    fewer = whole.experts < model.experts
    note = f"{whole.experts} of {model.experts} experts" if fewer else ""
    lacking = whole.experts * GPUS < model.experts * bench.ranks
    judged = bench.ranks > 1 and tokens == TOKENS and not lacking
    made = []
    for side in taking:
        for what in ("forward", "backward"):
            asked = model.asked.get(what) if judged and side.endswith(KINDS[0]) else None
            made += rate(sides, side, what, model.flops(tokens, what), asked, note)
    if ends:
        for what in ("forward", "backward"):
            made += sides.record(alone, what, flops=model.flops(tokens, what), note=note)
    for side in ends:
        made += sides.record(side, "dispatch") + sides.record(side, "combine")
        made += exposed(sides, side, alone, judged)
    return made + _once(sides.lost)


def rate(
    sides: RankSides, side: str, what: str, flops: int, asked: float | None, note: str = ""
) -> list[Record]:
    """A pass, against the TFLOP/s that are asked of it."""
    if asked is None:
        return sides.record(side, what, flops=flops, note=note)
    note = f"asked {asked:g} TFLOP/s{note and ', '}{note}"
    judged = dict(other=flops / asked * 1e-9, bars=(1.0, None), note=note)
    return sides.record(side, what, flops=flops, **judged)


def exposed(sides: RankSides, side: str, alone: str, judged: bool) -> list[Record]:
    """The part of dispatch and combine that the forward pass of a layer waits for."""
    whole, experts = sides.time(side, "forward"), sides.time(alone, "forward")
    out, back = sides.time(side, "dispatch"), sides.time(side, "combine")
    if whole is None or experts is None or out is None or back is None:
        return []
    waited = whole.ms - experts.ms
    share = waited / (out.ms + back.ms)
    note = f"{share:.2f} of both exchanges"
    at = (sides.suite, sides.shape, side, "exposed", sides.bench.mode, waited)
    if not judged:
        return [Record(*at, note=note)]
    ratio = EXPOSED_ASKED / max(share, 0.01)
    note = f"{note}, asked {EXPOSED_ASKED}"
    return [Record(*at, ratio=ratio, bar=1.0, note=note)]


def flash(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    sides, taking = bench.sides("flash", model.shape(tokens)), []
    problem = Layer(bench, model, dist.group.WORLD)
    for kind in KINDS:
        given = problem.given(kind, tokens)
        taking += problem.take_part(sides, given, kind, backward=False)
    sides.run()
    made = []
    for side in taking:
        asked = FLASH_TOKENS.get(tokens) if model == FLASH and bench.ranks > 1 else None
        judged: dict[str, Any] = {}
        if asked is not None and side.endswith(KINDS[0]):
            judged = dict(other=asked, bars=(1.0, None), note=f"asked {asked} ms")
        made += sides.record(side, "forward", flops=model.flops(tokens, "forward"), **judged)
    return made + sides.lost


def scaling(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    shape, ranks = model.shape(tokens), bench.ranks
    if ranks < 4 or ranks % 2:
        why = f"needs an even number of ranks above 2, not {ranks}"
        return [Record("scaling", shape, "-", "-", bench.mode, note=why)]
    sides, pair = bench.sides("scaling", shape), dist.new_subgroups(2)[0]
    flops, made = model.flops(tokens, "forward"), []
    taking: dict[int, list[str]] = {}
    for size, group in ((2, pair), (ranks, dist.group.WORLD)):
        problem = Layer(bench, model, group)
        taking[size] = []
        for kind in KINDS:
            given = problem.given(kind, tokens)
            label = f"{size} ranks, {kind}"
            taking[size] += problem.take_part(sides, given, label, backward=False)
    sides.run()
    for few, many in zip(taking[2], taking[ranks], strict=True):
        least = sides.time(few, "forward")
        judged = {} if least is None else dict(other=least.ms, bars=(SCALING_ASKED, None))
        made += sides.record(few, "forward", flops=flops)
        made += sides.record(many, "forward", flops=flops, **judged)
    return made + sides.lost


def skew(bench: RankBench, model: Model, tokens: int) -> list[Record]:
    """All tokens to the first rank, against the time of its experts."""
    model = model._replace(shared=0)  # which all ranks share
    whole, shape = fitted(bench, model), model.shape(tokens)
    if bench.ranks == 1:
        return [Record("skew", shape, "-", "-", bench.mode, note="needs several ranks")]
    sides = bench.sides("skew", shape)
    problem = Layer(bench, whole, dist.group.WORLD)
    where = dict(rank=bench.rank, device=bench.clock.device)
    given = inputs(bench, whole, uneven("one rank", tokens, whole.experts, whole.top_k, **where))
    taking = problem.take_part(sides, given, "one rank", backward=True)
    alone = problem.alone(sides, given, "one rank")
    sides.run()
    fewer = f"{whole.experts} experts" if whole.experts < model.experts else ""
    made = []
    for what in ("forward", "backward"):
        flops, least = bench.ranks * model.flops(tokens, what), sides.time(alone, what)
        made += sides.record(alone, what, flops=flops, note=fewer)
        for side in taking:
            judged = {} if least is None else dict(other=least.ms, bars=(SKEW_ASKED, None))
            made += sides.record(side, what, flops=flops, note=fewer, **judged)
    return made + sides.lost


def _once(lost: Sequence[Record]) -> list[Record]:
    """Without repetitions, as of a transport that was asked for twice."""
    return list(dict.fromkeys(lost))
