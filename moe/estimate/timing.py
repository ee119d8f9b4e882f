"""Step time: work of the slowest stage over the rates of a machine, expected and at best.

Expected: GEMMs, core attention, elementwise work and the exchanges of experts and of linear
attention run one after another, as they do in this code; exchanges that overlap the experts, or
another micro-batch (`parallel.overlap_microbatches`), are exposed in part. Gradient reduction
overlaps all of it if `parallel.overlap` is on. Stragglers, uneven routing and host time are not
counted.

At best: matrix products and core attention alone, with everything else overlapped, for any
transport. Other systems overlap exchanges with another micro-batch (DualPipe, arXiv 2412.19437;
Megatron-Core's combined 1F1B), so a sum of both would not be a bound.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from phalanx.configs.arithmetic.accounting import (
    delta_rule_products,
    flops_per_token,
    projections,
)
from phalanx.configs.arithmetic.layers import mlp_layers
from phalanx.configs.formats import in_bf16, multiplies_fp8, width
from phalanx.configs.layout import (
    data_parallel_size,
    expert_parallel_size,
    logit_interval,
    micro_batches,
    pipeline_chunks,
    stage_ranks,
)
from phalanx.configs.linear_attention import linear_layers
from phalanx.configs.schema import Config
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.machines import Machine
from phalanx.moe.estimate.activations import Activations, sizes
from phalanx.moe.estimate.gains.delayed_wgrad import experts_wait, waits
from phalanx.moe.estimate.heads import heads_seconds
from phalanx.moe.estimate.memory import stage_memory
from phalanx.moe.estimate.pipeline import step_seconds
from phalanx.moe.estimate.traffic import Traffic, costs, least_traffic, overlap_sms, traffic
from phalanx.moe.estimate.weights import LayerKind, layer_kinds, split_masters, stage_weights
from phalanx.parallel.dispatcher.costs import Links


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest stage."""

    gemm: float
    """Attention projections, dense MLPs, shared experts, output layer."""
    experts: float
    attention: float
    elementwise: float
    exchange: float
    """Dispatch and combine of expert tokens, as far as no other micro-batch hides them."""
    heads: float
    """All-to-all of linear attention's heads between context ranks."""
    offload: float
    """Exposed part of copies to and from host memory."""
    waiting: float
    """Pipeline bubble."""
    gradients: float
    """Exposed part of gradient reduction and parameter gathering."""
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Bound:
    """Lower bound of a step of a layout with any transport and overlap, at a machine's rates."""

    seconds: float
    limit: str
    """The bottleneck: `matrix products`, `network` or `links inside a node`."""


def step_time(cfg: Config, world: int, machine: Machine) -> StepTime:
    """Expected time of a step; `cfg` has resolved kernels."""
    one_way, heads = _exchange(cfg, world, machine), heads_seconds(cfg, machine)
    stages, works = [], _stages(cfg, world, machine)
    for work in works:
        written = _PASSES * work.written + _RECOMPUTE_PASSES * work.refilled
        elementwise = written / (machine.memory_gbs * 1e9)
        sent = (work.tokens * work.sparse * sum(one_way), work.tokens * work.linear * heads)
        busy = (*work.seconds, elementwise, *sent)
        stages.append((*busy, _copies(sum(busy), work.offloaded, machine)))
    seconds = [sum(stage) for stage in stages]
    slow, count = stages[seconds.index(max(seconds))], micro_batches(cfg, world)
    gemm, experts, attention, elementwise, exchange, heads, offload = (count * t for t in slow)
    if cfg.parallel.overlap_microbatches == "on":
        computing = max(seconds) - slow[4]
        exchange = _not_hidden(slow[4], one_way, computing, count)
    reduction, update = _update(cfg, world, machine)
    if cfg.parallel.overlap:
        # Reduction overlaps the last micro-batch's backward pass, 0.6 of which it can use.
        reduction = max(0.0, reduction - 0.6 * max(seconds))
    delayed = [work.delayed for work in works]
    chunks, held = cfg.parallel.virtual_pipeline, _held(cfg, world)
    total = step_seconds(seconds, count, chunks, delayed, held)
    wait = total - count * max(seconds)
    return StepTime(
        gemm, experts, attention, elementwise, exchange, heads, offload, wait, reduction, update
    )


def _not_hidden(
    exchange: float, one_way: tuple[float, float], computing: float, micro_batches: int
) -> float:
    """Exposed seconds of exchanges where forward passes run beside backward passes.

    Those of the first forward and the last backward pass are exposed. Between them the exchanges of
    a backward pass are hidden by a forward pass, a third of the work, and the other way round.

    Args:
        exchange: seconds of a micro-batch.
        one_way: its parts in the forward and in the backward pass, in any unit.
        computing: seconds of all other work of a micro-batch.
        micro_batches: number per step.
    """
    forward, backward = (exchange * part / (sum(one_way) or 1.0) for part in one_way)
    exposed = max(0.0, backward - computing / 3, forward - computing * 2 / 3)
    return exchange + (micro_batches - 1) * exposed


def _held(cfg: Config, world: int) -> list[int]:
    """Backward passes of each stage whose weight gradients wait beyond a transfer."""
    return [m.held for m in stage_memory(cfg, world)]


def _copies(seconds: float, offloaded: float, machine: Machine) -> float:
    """Exposed seconds of a micro-batch's copies to and from host memory.

    Copies to the host overlap the forward pass, a third of the work, and copies back overlap the
    backward pass.
    """
    copy = offloaded / (machine.host_gbs * 1e9)
    return max(0.0, copy - seconds / 3) + max(0.0, copy - seconds * 2 / 3)


def bound(cfg: Config, world: int, machine: Machine) -> Bound:
    """Bound of a step with balanced experts, `run.recompute` and the pipeline schedule of `cfg`.

    Links run at their line rate, both kinds at once.
    """
    sent = least_traffic(cfg, world)
    bytes_ = sent.forward + sent.backward
    near, far = bytes_.near / machine.node_line_gbs, bytes_.far / machine.network_line_gbs
    stages, works = [], _stages(cfg, world, machine)
    for work in works:
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
    chunks, delayed = cfg.parallel.virtual_pipeline, [work.delayed for work in works]
    count, held = micro_batches(cfg, world), _held(cfg, world)
    total = step_seconds(seconds, count, chunks, delayed, held)
    total += _update(cfg, world, machine)[1]
    return Bound(total, max(slow, key=lambda name: slow[name]))


class _Flops(NamedTuple):
    """FLOPs of a token, forward and backward, without recomputation."""

    projections: float
    """Projections of one attention, average over the layers."""
    core: float
    """Core attention or delta rule of a layer, average over the layers."""
    mlp: float
    """One dense MLP."""
    routed: float
    shared: float
    head: float
    """Output layer, of all losses."""
    mtp_projection: float
    """Input projection of a multi-token-prediction layer."""


def _flops(cfg: Config) -> _Flops:
    """`configs.arithmetic.accounting.flops_per_token` by part."""
    m, e = cfg.model, cfg.model.moe
    linear, total = flops_per_token(m, 0), flops_per_token(m, cfg.data.sequence_length)
    dense, sparse = mlp_layers(m)
    layers = dense + sparse
    matrix = 6.0 * m.hidden * (ACTIVATIONS[e.activation].halves + 1)
    mlp, routed, shared = matrix * m.dense_ffn, matrix * e.ffn * e.top_k, matrix * e.shared_ffn
    head, mtp_projection = 6.0 * (1 + m.mtp_layers) * m.hidden * m.vocab_size, 12.0 * m.hidden**2
    rest = head + m.mtp_layers * mtp_projection + dense * mlp
    rest += sparse * (routed + shared)
    state = 6.0 * linear_layers(m) * delta_rule_products(m)
    projections, core = (linear - state - rest) / layers, (total - linear + state) / layers
    return _Flops(projections, core, mlp, routed, shared, head, mtp_projection)


class _Work(NamedTuple):
    """Work of a micro-batch on one stage."""

    seconds: tuple[float, float, float]
    """Seconds of GEMMs, experts, core attention."""
    delayed: float
    """Seconds of weight gradients that wait: a third of GEMMs, and of experts if theirs wait."""
    written: float
    """Bytes that layers save if nothing is recomputed."""
    refilled: float
    """Bytes that selective recomputation restores."""
    offloaded: float
    """Bytes copied to host memory, and back."""
    sparse: int
    """MoE layers."""
    linear: int
    """Layers of linear attention."""
    tokens: int
    """Tokens of a rank; tensor ranks share the work on a sequence."""


def _stages(cfg: Config, world: int, machine: Machine) -> list[_Work]:
    f, factors, tokens = _flops(cfg), _work_factors(cfg), sizes(cfg, world).local_tokens
    core_work = factors.core + _logit_products(cfg)
    saved, head_saved = _saved(cfg, world)
    refilled, offloaded = _refilled(cfg, world), _offloaded(cfg, world)
    rates = {fp8: _rates(cfg, machine, fp8) for fp8 in (False, True)}
    quantization = 1e12 * _quantized_bytes(cfg) / (machine.memory_gbs * 1e9)  # ps, like FLOP/rate
    none = _Work((0.0, 0.0, 0.0), 0.0, 0.0, 0.0, 0.0, 0, 0, tokens)
    dense_share, expert_share = waits(cfg) / 3, experts_wait(cfg, world) / 3
    stages = [none for _ in range(cfg.parallel.pipeline)]
    first = 0
    for i, letters in enumerate(pipeline_chunks(cfg)):
        kinds, mtp, head = layer_kinds(cfg, letters, first), letters.count("m"), letters.count("L")
        first += letters.count("t")
        sparse = [kind for kind in kinds if not kind.dense]
        gemm = (head * f.head + mtp * f.mtp_projection) / machine.dense_tflops
        delayed = dense_share * gemm
        for kind in kinds:
            mlp = factors.mlp * f.mlp if kind.dense else factors.shared * f.shared
            gemm += (factors.projections * f.projections + mlp) / rates[kind.fp8].dense
            once = f.projections + (f.mlp if kind.dense else f.shared)
            delayed += dense_share * once / rates[kind.fp8].dense
        experts = sum(factors.routed * f.routed / rates[kind.fp8].experts for kind in sparse)
        experts += sum(kind.fp8 for kind in sparse) * quantization
        delayed += expert_share * sum(f.routed / rates[kind.fp8].experts for kind in sparse)
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
            before.delayed + tokens * delayed / 1e12,
            before.written + sum(saved[kind] for kind in kinds) + head * head_saved,
            before.refilled + sum(refilled[kind] for kind in kinds),
            before.offloaded + sum(offloaded[kind] for kind in kinds),
            before.sparse + len(sparse),
            before.linear + sum(kind.linear for kind in kinds),
            tokens,
        )
    return stages


_FP8_PASSES = 5.5
"""Bytes read and written to quantise and transpose the rows of an expert, per channel of x, gate
and up, forward and backward. Fitted, with `expert_fp8_tflops` for the products, to steps of four
models in bf16 and FP8 (tests/moe/estimate/gains/test_fp8_gain.py); of the kernels alone it is 5 %
optimistic for experts of 2048 x 768 (docs/measured/kernels/fp8.json)."""


def _quantized_bytes(cfg: Config) -> float:
    """Bytes of a token and MoE layer that quantisation reads and writes, where products are FP8."""
    m = cfg.model
    if not multiplies_fp8(cfg):
        return 0.0
    channels = m.hidden + ACTIVATIONS[m.moe.activation].halves * m.moe.ffn
    return _FP8_PASSES * m.moe.top_k * channels


def _logit_products(cfg: Config) -> float:
    """Work to measure the largest attention logits, as a fraction of core attention.

    Products of queries and keys are computed once more in the steps that measure them.
    """
    a, every = cfg.model.attention, logit_interval(cfg.optim)
    if not every:
        return 0.0
    key = a.head_dim if a.kind == "gqa" else a.qk_nope_dim + a.qk_rope_dim
    value = a.head_dim if a.kind == "gqa" else a.v_dim
    return key / (key + value) / 3 / every


class _WorkFactors(NamedTuple):
    """Work with recomputation over work without it."""

    projections: float
    core: float
    mlp: float
    shared: float
    routed: float


def _work_factors(cfg: Config) -> _WorkFactors:
    """Factors by part of a layer.

    A forward pass is a third of the work, and an MLP's first product its gated share of that.
    """
    m, recompute = cfg.model, set(cfg.run.recompute)
    gated = ACTIVATIONS[m.moe.activation].halves
    first, forward = gated / (gated + 1) / 3, 1 / 3
    full = forward if "full" in recompute else 0.0
    moe = forward if recompute & {"moe", "full"} else 0.0
    weights = [rows * columns for rows, columns in projections(m.hidden, m.attention)]
    up = 0.0
    if "mla_up" in recompute:  # all but the down-projections and that of the output
        of_query, of_keys = 1 if m.attention.q_lora_rank else 0, -2
        up = (weights[of_query] + weights[of_keys]) / sum(weights) / 3
    mlp = first if "mlp" in recompute else 0.0
    return _WorkFactors(
        projections=1 + full + up,
        core=1 + (forward if recompute & {"attention", "full"} else 0.0),
        mlp=1 + full + mlp,
        shared=1 + moe + mlp,
        routed=1 + moe + (first if "expert_h" in recompute else 0.0),
    )


def _refilled(cfg: Config, world: int) -> dict[LayerKind, int]:
    """Bytes that selective recomputation restores, of a layer of each kind."""
    act = _balanced(cfg, world)
    names = [name for name in cfg.run.recompute if name in ("norm", "mla_up", "attention", "mlp")]
    return {
        kind: sum(act.bytes_freed(kind, name) for name in names) for kind in act.per_layer_kind()
    }


def _offloaded(cfg: Config, world: int) -> dict[LayerKind, int]:
    """Bytes copied to host memory, of a layer of each kind, unused expert rows included."""
    return {
        kind: layer.offloaded for kind, layer in Activations(cfg, world).per_layer_kind().items()
    }


_RECOMPUTE_PASSES = 6.0
"""Reads and writes of a recomputed tensor: its inputs, itself, and a copy to its old storage."""
_PASSES = 6.0
"""Reads and writes of a saved tensor by elementwise work, forward and backward."""


def _exchange(cfg: Config, world: int, machine: Machine) -> tuple[float, float]:
    """Seconds of dispatch and combine per token and MoE layer, in the forward and backward pass."""
    sent: Traffic = traffic(cfg, world)
    forward, backward = (_crossing(cfg, world, machine, x) for x in (sent.forward, sent.backward))
    return forward, backward


def _crossing(cfg: Config, world: int, machine: Machine, sent: Links) -> float:
    """Exposed seconds of a token's bytes."""
    near, far = sent.near / (machine.node_gbs * 1e9), sent.far / (machine.network_gbs * 1e9)
    transport = costs(cfg, world)
    if overlap_sms(cfg, world):
        near *= transport.exposed
    if transport.pipelined and not expert_backend(cfg.kernels.backend).stock_layer:
        return max(near, far)
    return near + far


class _Rates(NamedTuple):
    """TFLOP/s of a layer, forward and backward."""

    dense: float
    experts: float


def _rates(cfg: Config, machine: Machine, fp8: bool) -> _Rates:
    """Rates of a layer in FP8 or not."""
    m, p, facts = machine, cfg.precision, expert_backend(cfg.kernels.backend)
    fast = fp8 and multiplies_fp8(cfg)

    def mixed(slow: float, quick: float) -> float:
        """Mean rate if weight gradients, a third of the work, may be in bf16."""
        return quick if p.wgrad == "fp8" else 3 / (2 / quick + 1 / slow)

    dense = mixed(m.dense_tflops, m.dense_fp8_tflops)
    experts = mixed(m.expert_tflops, m.expert_fp8_tflops)
    return _Rates(
        dense if fast and p.dense == "fp8" and not facts.stock_layer else m.dense_tflops,
        experts if fast else m.expert_tflops,
    )


def _saved(cfg: Config, world: int) -> tuple[dict[LayerKind, int], int]:
    """Activation bytes of a layer of each kind and of the head if nothing is recomputed.

    Unused expert rows are never touched and so not counted.
    """
    act = _balanced(cfg, world)
    saved = {kind: layer.saved for kind, layer in act.per_layer_kind().items()}
    return saved, act.head().saved


def _balanced(cfg: Config, world: int) -> Activations:
    """Activations without recomputation and offloading, with balanced experts."""
    run = replace(cfg.run, recompute=[], offload=[])
    parallel = replace(cfg.parallel, capacity_factor=1.0)
    return Activations(replace(cfg, run=run, parallel=parallel), world)


_FP32_RATE = 0.1
"""Rate of matrix products in fp32 relative to bf16."""


_MUON_BYTES = 36
"""Bytes read and written per element around Muon's products: momentum, norm, rounding."""


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
        # Moments and master weights are read and written; gradients read, zeroed and normed.
        state = w.optimizer_bytes * (4 / 3 if split_masters(cfg) else 1)  # with their upper halves
        touched = 2 * state + 3 * w.gradient_bytes
        touched += _MUON_BYTES * w.by_muon.elements
        seconds = touched / (machine.memory_gbs * 1e9)
        rate = machine.dense_tflops * (1 if in_bf16(cfg) else _FP32_RATE)
        seconds += cfg.optim.ns_steps * w.by_muon.flops / (rate * 1e12)
        update = max(update, seconds)
    return reduction, update
