"""Time of a step: work of the slowest stage over the rates of a machine, expected and at best.

Expected: GEMMs, core attention, elementwise work and the exchanges of experts and of linear
attention follow one another, as they do in this code; of pushes beside the experts
(`parallel.comm_sms`) only a part is waited for. Gradient reduction hides behind all that where
`parallel.overlap` is on. Stragglers, uneven routing and the host are left out.

At best: matrix products and core attention alone, with everything else behind them, whatever the
transport. Others hide exchanges under the work on another micro-batch (DualPipe, arXiv 2412.19437;
Megatron-Core's combined 1F1B), so that a sum of both would be no bound.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from phalanx.configs.activations import ACTIVATIONS
from phalanx.configs.formats import MULTIPLIES_FP8, in_bf16, width
from phalanx.configs.layout import (
    data_parallel_size,
    expert_parallel_size,
    logit_interval,
    micro_batches,
    pipeline_chunks,
    stage_ranks,
)
from phalanx.configs.linear_attention import linear_layers
from phalanx.configs.machines import Machine
from phalanx.configs.schema import Config
from phalanx.moe.estimate.accounting import (
    delta_rule_products,
    flops_per_token,
    projections,
)
from phalanx.moe.estimate.activations import Activations, sizes
from phalanx.moe.estimate.heads import heads_seconds
from phalanx.moe.estimate.pipeline import step_seconds
from phalanx.moe.estimate.traffic import Traffic, costs, least_traffic, overlaps, traffic
from phalanx.moe.estimate.weights import LayerKind, halves, layer_kinds, stage_weights


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest stage."""

    gemm: float
    """Attention projections, dense MLPs, shared experts, output layer."""
    experts: float
    attention: float
    elementwise: float
    exchange: float
    """Tokens to experts and back."""
    heads: float
    """Heads of linear attention to context ranks and back."""
    offload: float
    """Copies to and from host memory that take longer than what they run beside."""
    waiting: float
    """Pipeline bubble."""
    gradients: float
    """Reduction and parameter gathering that nothing hides."""
    optimizer: float

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Bound:
    """A step of a layout that no transport and no overlap makes shorter, at a machine's rates."""

    seconds: float
    limit: str
    """What takes them: `matrix products`, `network` or `links inside a node`."""


def step_time(cfg: Config, world: int, machine: Machine) -> StepTime:
    """Of a step; `cfg` has resolved kernels."""
    exchange, heads = _exchange(cfg, world, machine), heads_seconds(cfg, machine)
    stages = []
    for work in _stages(cfg, world, machine):
        written = _PASSES * work.written + _PASSES_AGAIN * work.filled
        elementwise = written / (machine.memory_gbs * 1e9)
        sent = (work.tokens * work.sparse * exchange, work.tokens * work.linear * heads)
        busy = (*work.seconds, elementwise, *sent)
        stages.append((*busy, _copies(sum(busy), work.moved, machine)))
    seconds = [sum(stage) for stage in stages]
    slow, count = stages[seconds.index(max(seconds))], micro_batches(cfg, world)
    gemm, experts, attention, elementwise, exchange, heads, offload = (count * t for t in slow)
    reduction, update = _update(cfg, world, machine)
    if cfg.parallel.overlap:
        # The last micro-batch's backward pass is what there is to hide behind.
        reduction = max(0.0, reduction - 0.6 * max(seconds))
    wait = step_seconds(seconds, count, cfg.parallel.virtual_pipeline) - count * max(seconds)
    return StepTime(
        gemm, experts, attention, elementwise, exchange, heads, offload, wait, reduction, update
    )


def _copies(seconds: float, moved: float, machine: Machine) -> float:
    """Seconds of a micro-batch that wait for copies to host memory, beside its forward pass, a
    third of the work, and from there, beside its backward pass."""
    copy = moved / (machine.host_gbs * 1e9)
    return max(0.0, copy - seconds / 3) + max(0.0, copy - seconds * 2 / 3)


def bound(cfg: Config, world: int, machine: Machine) -> Bound:
    """Of a step with balanced experts, `run.recompute` and the pipeline's schedule as in `cfg`.

    Links run at their line rate, both kinds at once.
    """
    sent = least_traffic(cfg, world)
    bytes_ = sent.forward + sent.backward
    near, far = bytes_.near / machine.node_line_gbs, bytes_.far / machine.network_line_gbs
    stages = []
    for work in _stages(cfg, world, machine):
        rows = work.tokens * work.sparse / 1e9
        stages.append(
            {
                "matrix products": sum(work.seconds),
                "network": rows * far,
                "links inside a node": rows * near,
            }
        )
    seconds = [max(stage.values()) for stage in stages]
    slow = stages[seconds.index(max(seconds))]
    total = step_seconds(seconds, micro_batches(cfg, world), cfg.parallel.virtual_pipeline)
    total += _update(cfg, world, machine)[1]
    return Bound(total, max(slow, key=lambda what: slow[what]))


class _Flops(NamedTuple):
    """Forward and backward of a token, without recomputation."""

    projections: float
    """Of one attention, on average over the layers."""
    core: float
    """Of one core attention or delta rule, on average over the layers."""
    mlp: float
    """Of one dense MLP."""
    routed: float
    shared: float
    head: float
    """Output layer, of all losses."""
    joining: float
    """What a prediction layer has beside a layer."""


def _flops(cfg: Config) -> _Flops:
    """`moe.estimate.accounting.flops_per_token` by part."""
    m, e = cfg.model, cfg.model.moe
    linear, whole = flops_per_token(m, 0), flops_per_token(m, cfg.data.sequence_length)
    layers = m.layers + m.mtp_layers
    matrix = 6.0 * m.hidden * (ACTIVATIONS[e.activation].halves + 1)
    mlp, routed, shared = matrix * m.dense_ffn, matrix * e.ffn * e.top_k, matrix * e.shared_ffn
    head, joining = 6.0 * (1 + m.mtp_layers) * m.hidden * m.vocab_size, 12.0 * m.hidden**2
    rest = head + m.mtp_layers * joining + e.dense_layers * mlp
    rest += (layers - e.dense_layers) * (routed + shared)
    state = 6.0 * linear_layers(m) * delta_rule_products(m)
    projections, core = (linear - state - rest) / layers, (whole - linear + state) / layers
    return _Flops(projections, core, mlp, routed, shared, head, joining)


class _Work(NamedTuple):
    """Of a micro-batch on one stage."""

    seconds: tuple[float, float, float]
    """GEMMs, experts, core attention."""
    written: float
    """Bytes that layers keep if nothing is recomputed."""
    filled: float
    """Bytes of what is computed again part by part, and copied to where it was."""
    moved: float
    """Bytes to host memory, and from there."""
    sparse: int
    """MoE layers."""
    linear: int
    """Layers of linear attention."""
    tokens: int
    """Of a rank; tensor ranks share the work on a sequence."""


def _stages(cfg: Config, world: int, machine: Machine) -> list[_Work]:
    f, again, tokens = _flops(cfg), _again(cfg), sizes(cfg, world).local_tokens
    core_work = again.core + _measuring(cfg)
    kept, ends = _kept(cfg, world)
    filled, moved = _filled(cfg, world), _moved(cfg, world)
    rates = {fp8: _rates(cfg, machine, fp8) for fp8 in (False, True)}
    none = _Work((0.0, 0.0, 0.0), 0.0, 0.0, 0.0, 0, 0, tokens)
    stages = [none for _ in range(cfg.parallel.pipeline)]
    first = 0
    for i, letters in enumerate(pipeline_chunks(cfg)):
        kinds, mtp, end = layer_kinds(cfg, letters, first), letters.count("m"), letters.count("L")
        first += letters.count("t")
        sparse = [kind for kind in kinds if not kind.dense]
        gemm = (end * f.head + mtp * f.joining) / machine.dense_tflops
        for kind in kinds:
            mlp = again.mlp * f.mlp if kind.dense else again.shared * f.shared
            gemm += (again.projections * f.projections + mlp) / rates[kind.fp8].dense
        experts = sum(again.routed * f.routed / rates[kind.fp8].experts for kind in sparse)
        core = core_work * len(kinds) * f.core / machine.attention_tflops
        more = [tokens * part / 1e12 for part in (gemm, experts, core)]
        stage = i % cfg.parallel.pipeline
        before = stages[stage]
        stages[stage] = _Work(
            (
                before.seconds[0] + more[0],
                before.seconds[1] + more[1],
                before.seconds[2] + more[2],
            ),
            before.written + sum(kept[kind] for kind in kinds) + end * ends,
            before.filled + sum(filled[kind] for kind in kinds),
            before.moved + sum(moved[kind] for kind in kinds),
            before.sparse + len(sparse),
            before.linear + sum(kind.linear for kind in kinds),
            tokens,
        )
    return stages


def _measuring(cfg: Config) -> float:
    """Part of core attention, forward and backward, that the largest logits take: products of
    queries and keys once more, in the steps that measure them."""
    a, every = cfg.model.attention, logit_interval(cfg.optim)
    if not every:
        return 0.0
    key = a.head_dim if a.kind == "gqa" else a.qk_nope_dim + a.qk_rope_dim
    value = a.head_dim if a.kind == "gqa" else a.v_dim
    return key / (key + value) / 3 / every


class _Again(NamedTuple):
    """Work with what is computed again, over work without it."""

    projections: float
    core: float
    mlp: float
    shared: float
    routed: float


def _again(cfg: Config) -> _Again:
    """A forward pass is a third of the work; the first product of an MLP its gated share of it."""
    m, how = cfg.model, set(cfg.run.recompute)
    gated = ACTIVATIONS[m.moe.activation].halves
    first, whole = gated / (gated + 1) / 3, 1 / 3
    everything = whole if "full" in how else 0.0
    of_moe = whole if how & {"moe", "full"} else 0.0
    weights = [rows * columns for rows, columns in projections(m.hidden, m.attention)]
    up = 0.0
    if "mla_up" in how:  # all but the down-projections and that of the output
        of_query, of_keys = 1 if m.attention.q_lora_rank else 0, -2
        up = (weights[of_query] + weights[of_keys]) / sum(weights) / 3
    mlp = first if "mlp" in how else 0.0
    return _Again(
        projections=1 + everything + up,
        core=1 + (whole if how & {"attention", "full"} else 0.0),
        mlp=1 + everything + mlp,
        shared=1 + of_moe + mlp,
        routed=1 + of_moe + (first if "expert_h" in how else 0.0),
    )


def _filled(cfg: Config, world: int) -> dict[LayerKind, int]:
    """Of a layer of each kind: bytes of parts that are computed again where they were."""
    act = _balanced(cfg, world)
    again = [name for name in cfg.run.recompute if name in ("norm", "mla_up", "attention", "mlp")]
    return {kind: sum(act.freed(kind, name) for name in again) for kind in act.by_kind()}


def _moved(cfg: Config, world: int) -> dict[LayerKind, int]:
    """Of a layer of each kind: bytes to host memory, rows that nobody takes included."""
    return {kind: layer.moved for kind, layer in Activations(cfg, world).by_kind().items()}


_PASSES_AGAIN = 6.0
"""Times that a part that is computed again is written or read: made of as much, and copied."""
_PASSES = 6.0
"""Times that what a layer keeps is written or read by elementwise work, forward and backward."""


def _exchange(cfg: Config, world: int, machine: Machine) -> float:
    """Seconds a token and MoE layer."""
    sent: Traffic = traffic(cfg, world)
    bytes_ = sent.forward + sent.backward
    near, far = bytes_.near / (machine.node_gbs * 1e9), bytes_.far / (machine.network_gbs * 1e9)
    how = costs(cfg, world)
    if overlaps(cfg, world):
        near *= how.exposed
    if how.pipelined and cfg.kernels.backend != "megatron":
        return max(near, far)
    return near + far


class _Rates(NamedTuple):
    """TFLOP/s of a layer, forward and backward."""

    dense: float
    experts: float


def _rates(cfg: Config, machine: Machine, fp8: bool) -> _Rates:
    """Of a layer in FP8 or not."""
    m, p, backend = machine, cfg.precision, cfg.kernels.backend
    fast = fp8 and backend in MULTIPLIES_FP8

    def mixed(slow: float, quick: float) -> float:
        """A third of the work are weight gradients."""
        return quick if p.wgrad == "fp8" else 3 / (2 / quick + 1 / slow)

    dense = mixed(m.dense_tflops, m.dense_fp8_tflops)
    experts = mixed(m.expert_tflops, m.expert_fp8_tflops)
    return _Rates(
        dense if fast and p.dense == "fp8" and backend != "megatron" else m.dense_tflops,
        experts if fast else m.expert_tflops,
    )


def _kept(cfg: Config, world: int) -> tuple[dict[LayerKind, int], int]:
    """Activation bytes of a layer of each kind and of the ends if nothing is recomputed.

    Of experts, rows that tokens take; others are never touched.
    """
    act = _balanced(cfg, world)
    kept = {kind: layer.saved for kind, layer in act.by_kind().items()}
    return kept, act.head().saved


def _balanced(cfg: Config, world: int) -> Activations:
    """Of layers that keep all, with balanced experts."""
    run = replace(cfg.run, recompute=[], offload=[])
    parallel = replace(cfg.parallel, capacity_factor=1.0)
    return Activations(replace(cfg, run=run, parallel=parallel), world)


_FP32_RATE = 0.1
"""Of matrix products in fp32, to those in bf16."""


_MUON_BYTES = 60
"""An element, read and written between the state and the products of Muon: momentum, norm, casts,
scale."""


def _update(cfg: Config, world: int, machine: Machine) -> tuple[float, float]:
    """Seconds of gradient reduction with parameter gathering, and of the optimizer."""
    p = cfg.parallel
    link = machine.node_gbs if world <= machine.node_gpus else machine.network_gbs
    replicas = data_parallel_size(cfg, world) * p.context
    copies = stage_ranks(cfg, world) // expert_parallel_size(cfg, world)
    grad, param = 2 if p.grad_dtype == "bf16" else 4, width(cfg)
    each = grad + param if p.distributed_optimizer else 2 * grad
    reduction = update = 0.0
    for w in stage_weights(cfg, world):
        sent = w.dense * (replicas - 1) / replicas + w.expert * (copies - 1) / copies
        reduction = max(reduction, sent * each / (link * 1e9))
        # Moments and master weights are read and written; gradients also cleared and measured.
        state = w.optimizer_bytes * (4 / 3 if halves(cfg) else 1)  # with masters' upper halves
        touched = 2 * state + 3 * w.gradient_bytes
        touched += _MUON_BYTES * w.by_muon.elements
        seconds = touched / (machine.memory_gbs * 1e9)
        rate = machine.dense_tflops * (1 if in_bf16(cfg) else _FP32_RATE)
        seconds += cfg.optim.ns_steps * w.by_muon.flops / (rate * 1e12)
        update = max(update, seconds)
    return reduction, update
