"""Suites `layer`, `flash`, `scaling` and `skew`: dispatch, experts and combine, without a router.

Weight gradients are bf16. TFLOP/s count the rows of a rank's share, T * K.

Legend: T tokens of a rank, D hidden, K experts of a token, N received rows, S expert rows.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from phalanx.kernels.expert_mlp.dense_mlp import dense_fc1, dense_fc2
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.moe.experts import Experts
from phalanx.parallel.dispatcher.base import Dispatcher
from phalanx.scripts.lab.bench.dispatch.ends import (
    ExchangeEnds,
    Inputs,
    all_ranks,
    dispatcher,
    inputs,
    transports,
)
from phalanx.scripts.lab.bench.models import (
    EXPOSED_TARGET,
    FLASH,
    FLASH_TOKENS,
    GPUS,
    SCALING_TARGET,
    SKEW_TARGET,
    TOKENS,
    Model,
)
from phalanx.scripts.lab.bench.problems import BF16, give_main_grads
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.routing import KINDS, routed, uneven
from phalanx.scripts.lab.bench.shapes import Bars
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, differing, passes

_W = 0.02
_COPIES, _SHARE = 5, 0.7
"""Copies of the weights' size (weights, gradients in graphs, in the eager call and in two
references), and the share of device memory that they may occupy."""
ALONE = "experts alone"


def fitting(bench: Bench, model: Model, memory: float) -> Model:
    """The layer, its experts halved until their weights and gradients fit in `memory` bytes."""
    matrices = 3 if model.activation.gated else 2
    while True:
        local = model.experts // bench.ranks
        fits = _COPIES * 2 * matrices * local * model.hidden * model.ffn <= _SHARE * memory
        if fits or local % 2 or model.experts // 2 < model.top_k:
            return model
        model = model._replace(experts=model.experts // 2)


def fitted(bench: Bench, model: Model) -> Model:
    """The layer that fits on this device, with the experts of `bench.ranks` of `GPUS` GPUs.

    The GEMMs of a GPU are then those of the targets; it sends fewer rows.
    """
    if bench.clock.device.type != "cuda":
        return model
    ranks = min(bench.ranks, GPUS)
    model = model._replace(experts=max(model.experts * ranks // GPUS, model.top_k))
    return fitting(bench, model, torch.cuda.get_device_properties(bench.clock.device).total_memory)


class Layer:
    """The experts of this rank in a group, and passes of the layer over them.

    With `accumulate`, gradients of parameters are added to fp32 buffers; a recipe caches weights in
    FP8.
    """

    def __init__(
        self,
        bench: Bench,
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
        options: dict[str, Any] = dict(
            accumulate=accumulate, recipe=recipe, keep_fp8=recipe is not None
        )
        self.spec = MLPSpec(model.activation, bench.backend, **options)
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
            give_main_grads(self.parameters)

    def beside(self, batch: Inputs) -> Tensor:
        w1, w2 = self.shared
        return dense_fc2(dense_fc1(batch.x_TD, w1, self.spec), w2, self.spec)

    def forward(self, transport: Dispatcher, batch: Inputs) -> Tensor:
        if not self.shared:
            received = transport.dispatch(batch.x_TD, batch.idx_TK, batch.prob_TK)
            return transport.combine(self.experts(received), received)
        w1, w2 = self.shared
        half = functools.cache(lambda: dense_fc1(batch.x_TD, w1, self.spec))
        sent = transport.send_tokens(batch.x_TD, batch.idx_TK, batch.prob_TK)
        if transport.splits_shared_experts:
            half()
        received = transport.receive_tokens(sent)
        del sent
        sums = transport.send_sums(self.experts(received), received, alone=False)
        addends = [dense_fc2(half(), w2, self.spec)]
        return transport.receive_sums(sums, received, addends)

    def both(self, transport: Dispatcher, batch: Inputs) -> tuple[Any, ...]:
        """Gradients of inputs and parameters; None for those added to buffers."""
        leaves = [batch.x_TD, batch.prob_TK, *self.parameters]
        out_TD = self.forward(transport, batch)
        added = self.spec.accumulate
        return torch.autograd.grad(out_TD, leaves, batch.dout_TD, allow_unused=added)

    def cases(
        self, timings: Timings, batch: Inputs, label: str, *, backward: bool, **judged: Any
    ) -> Iterator[Case]:
        """Every transport as side `<transport>, <label>`, checked against `alltoall`."""
        reference = dispatcher("alltoall", self.bench, self.model, batch, self.group)
        out_TD = self.forward(reference, batch).detach()
        gradients = self.both(reference, batch) if backward else ()
        exchange, group = self.bench.exchange, self.group
        made = transports(timings, self.model, batch, group, label, exchange)
        for name, transport in made.items():
            forward = functools.partial(self.forward, transport, batch)
            both = functools.partial(self.both, transport, batch)
            checks = (
                lambda out: differing([out], [out_TD], ["out"]),
                lambda got: differing(got, gradients, self.names),
            )
            timed = passes(f"{name}, {label}", forward, both, **judged)
            for case, check in zip(timed, checks[: 1 + backward], strict=False):
                yield replace(case, check=check)

    def alone(self, batch: Inputs, label: str, **judged: Any) -> Iterator[Case]:
        """The experts alone, on rows received beforehand, as a side."""
        reference = dispatcher("alltoall", self.bench, self.model, batch, self.group)
        with torch.no_grad():
            received = reference.dispatch(batch.x_TD, batch.idx_TK, batch.prob_TK)
        plan = received.plan
        assert plan.row_prob_S is not None
        prob_S = plan.row_prob_S.clone().requires_grad_()
        rows_ND = received.rows_ND.requires_grad_()
        ready = received._replace(rows_ND=rows_ND, plan=plan._replace(row_prob_S=prob_S))
        dout = [torch.randn_like(rows_ND), batch.dout_TD][: 2 if self.shared else 1]
        leaves = [rows_ND, prob_S, batch.x_TD, *self.parameters]

        def forward() -> list[Tensor]:
            out_ND = self.experts(ready)
            return [out_ND, self.beside(batch)] if self.shared else [out_ND]

        def both() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(forward(), leaves, dout, allow_unused=True)

        return passes(f"{ALONE}, {label}", forward, both, **judged)

    def batch(self, kind: str, tokens: int) -> Inputs:
        m, rank, device = self.model, self.group.rank(), self.bench.clock.device
        idx = routed(kind, tokens, m.experts, m.top_k, rank=rank, device=device)
        return inputs(self.bench, m, idx)


def layer(bench: Bench, model: Model, tokens: int) -> list[Record]:
    fitted_model, world = fitted(bench, model), all_ranks()
    timings = bench.timings("layer", model.shape(tokens))
    problem = Layer(bench, fitted_model, world)
    fewer = fitted_model.experts < model.experts
    note = f"{fitted_model.experts} of {model.experts} experts" if fewer else ""
    incomplete = fitted_model.experts * GPUS < model.experts * bench.ranks
    judged = bench.ranks > 1 and tokens == TOKENS and not incomplete
    cases, exposing, ends = list[Case](), False, list[Case]()
    for kind in KINDS:
        batch = problem.batch(kind, tokens)
        first = kind == KINDS[0]
        for case in problem.cases(timings, batch, kind, backward=True):
            cases.append(_targeted(case, model, tokens, note, judged=judged and first))
        if model.exposed and bench.ranks > 1 and first:
            exposing = True
            flops = model.flops(tokens, "forward")
            alone = list(problem.alone(batch, kind, flops=flops, note=note))
            exchanges = ExchangeEnds(timings, fitted_model, batch, world)
            for name, transport in transports(timings, fitted_model, batch, world, kind).items():
                ends += exchanges.cases(f"{name}, {kind}", transport, backward=False)
    records = timings.measure([*cases, *(alone if exposing else ()), *ends])
    for side in dict.fromkeys(case.side for case in ends):
        records += exposed(timings, side, f"{ALONE}, {KINDS[0]}", judged)
    return records


def _targeted(case: Case, model: Model, tokens: int, note: str, *, judged: bool) -> Case:
    """A pass with its operations, and the TFLOP/s that are its target if it has one."""
    pass_name = case.report or case.pass_name
    case = replace(case, flops=model.flops(tokens, pass_name), note=note)
    target = model.targets.get(pass_name) if judged else None
    return case if target is None else targeted(case, target)


def targeted(case: Case, target: float) -> Case:
    note = f"asked {target:g} TFLOP/s{case.note and ', '}{case.note}"
    return replace(case, against=case.flops / target * 1e-9, bars=(1.0, None), note=note)


def exposed(timings: Timings, side: str, alone: str, judged: bool) -> list[Record]:
    """The part of dispatch and combine that the forward pass of a layer waits for."""
    layer, experts = timings.time(side, "forward"), timings.time(alone, "forward")
    out, back = timings.time(side, "dispatch"), timings.time(side, "combine")
    if layer is None or experts is None or out is None or back is None:
        return []
    waited = layer.ms - experts.ms
    share = waited / (out.ms + back.ms)
    note = f"{share:.2f} of both exchanges"
    head = (timings.suite, timings.shape, side, "exposed", timings.bench.mode, waited)
    if not judged:
        return [Record(*head, note=note)]
    ratio = EXPOSED_TARGET / max(share, 0.01)
    note = f"{note}, asked {EXPOSED_TARGET}"
    return [Record(*head, ratio=ratio, bar=1.0, note=note)]


def flash(bench: Bench, model: Model, tokens: int) -> list[Record]:
    timings, cases = bench.timings("flash", model.shape(tokens)), list[Case]()
    problem = Layer(bench, model, all_ranks())
    target = FLASH_TOKENS.get(tokens) if model == FLASH and bench.ranks > 1 else None
    for kind in KINDS:
        judged: dict[str, Any] = {}
        if target is not None and kind == KINDS[0]:
            judged = dict(against=target, note=f"asked {target} ms")
        for case in problem.cases(
            timings, problem.batch(kind, tokens), kind, backward=False, **judged
        ):
            bars = (1.0, None) if judged else None
            cases.append(replace(case, flops=model.flops(tokens, "forward"), bars=bars))
    return timings.measure(cases)


def scaling(bench: Bench, model: Model, tokens: int) -> list[Record]:
    shape, ranks = model.shape(tokens), bench.ranks
    if ranks < 4 or ranks % 2:
        why = f"needs an even number of ranks above 2, not {ranks}"
        return [Record("scaling", shape, "-", "-", bench.mode, note=why)]
    timings, pair = bench.timings("scaling", shape), dist.new_subgroups(2)[0]
    flops = model.flops(tokens, "forward")
    of_size: dict[int, list[Case]] = {2: [], ranks: []}
    for size, group in ((2, pair), (ranks, all_ranks())):
        problem = Layer(bench, model, group)
        for kind in KINDS:
            batch, label = problem.batch(kind, tokens), f"{size} ranks, {kind}"
            of_size[size] += problem.cases(timings, batch, label, backward=False, flops=flops)
    cases = []
    for few, many in zip(of_size[2], of_size[ranks], strict=True):
        cases += [few, replace(many, against=few.side, bars=(SCALING_TARGET, None))]
    return timings.measure(cases)


def skew(bench: Bench, model: Model, tokens: int) -> list[Record]:
    """Time the layer with all tokens on the first rank, against the time of its experts."""
    model = model._replace(shared=0)  # which all ranks share
    fitted_model, shape = fitted(bench, model), model.shape(tokens)
    if bench.ranks == 1:
        return [Record("skew", shape, "-", "-", bench.mode, note="needs several ranks")]
    timings, problem = bench.timings("skew", shape), Layer(bench, fitted_model, all_ranks())
    sizes = tokens, fitted_model.experts, fitted_model.top_k
    idx = uneven("one rank", *sizes, rank=bench.rank, device=bench.clock.device)
    batch = inputs(bench, fitted_model, idx)
    note = f"{fitted_model.experts} experts" if fitted_model.experts < model.experts else ""
    judged: dict[str, Any] = dict(flops=bench.ranks * model.flops(tokens, "forward"), note=note)
    bars = Bars((SKEW_TARGET, SKEW_TARGET), (None, None))
    compared = judged | dict(against=f"{ALONE}, one rank", bars=bars)
    layers = problem.cases(timings, batch, "one rank", backward=True, **compared)
    alone = problem.alone(batch, "one rank", **judged)
    return timings.measure([*alone, *layers])
