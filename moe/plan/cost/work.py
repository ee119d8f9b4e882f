"""Work of a micro-batch on each pipeline stage: seconds of products at a machine's rates, bytes.

Recomputation (`run.recompute`) is part of the work.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import hypot
from typing import NamedTuple

from phalanx.configs.arithmetic.accounting import expert_weights, flops_per_token, mixer_products
from phalanx.configs.arithmetic.attention import head_dims, projections
from phalanx.configs.arithmetic.layers import expert_hidden, mlp_layers
from phalanx.configs.formats import grad_width, multiplies_fp8, quantizes_dense, width
from phalanx.configs.layout import expert_parallel_size, logit_interval, micro_batches
from phalanx.configs.remembered import remembered
from phalanx.configs.schema import Config
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.cost.activations import Activations, sizes
from phalanx.moe.plan.cost.delayed_wgrad import experts_wait, pairs, waits
from phalanx.moe.plan.cost.weights import Chunk, LayerKind, all_kinds, chunks, fp8_weights_by_kind


class Flops(NamedTuple):
    """FLOPs of a token, forward and backward, without recomputation."""

    projections: float  # projections of one attention, average over the layers
    core: float  # core attention or what a mixer has in its place, average over the layers
    mlp: float  # one dense MLP
    routed: float
    shared: float
    head: float  # output layer, of all losses
    mtp_projection: float  # input projection of a multi-token-prediction layer


@remembered("model", "data.sequence_length")
def flops(cfg: Config) -> Flops:
    """`configs.arithmetic.accounting.flops_per_token` by part."""
    m, e = cfg.model, cfg.model.moe
    linear, total = flops_per_token(m, 0), flops_per_token(m, cfg.data.sequence_length)
    dense, sparse = mlp_layers(m)
    layers = dense + sparse
    matrix = 6.0 * m.hidden * (ACTIVATIONS[e.activation].halves + 1)
    mlp, shared = matrix * m.dense_ffn, matrix * e.shared_ffn
    routed = 6.0 * expert_weights(m) * e.top_k
    head, mtp_projection = 6.0 * (1 + m.mtp_layers) * m.hidden * m.vocab_size, 12.0 * m.hidden**2
    rest = head + m.mtp_layers * mtp_projection + dense * mlp
    rest += sparse * (routed + shared)
    state = 6.0 * mixer_products(m)
    projections, core = (linear - state - rest) / layers, (total - linear + state) / layers
    return Flops(projections, core, mlp, routed, shared, head, mtp_projection)


class Work(NamedTuple):
    """Work of a micro-batch on one stage."""

    seconds: tuple[float, float, float]  # seconds of GEMMs, experts, core attention
    delayed: float  # seconds of weight gradients that wait for a pipeline's transfers
    written: float  # bytes that layers save if nothing is recomputed
    refilled: float  # bytes that selective recomputation restores
    offloaded: float  # bytes copied to host memory, and back
    layers: int
    mlps: int  # dense MLPs and shared experts
    sparse: int  # MoE layers
    mixers: Counter[str]  # layers with each mixer
    tokens: int  # tokens of a rank; tensor ranks share the work on a sequence


def stage_work(cfg: Config, world: int, machine: Machine) -> list[Work]:
    """Work of every stage, in order; `cfg` has resolved kernels."""
    f, factors, tokens = flops(cfg), _work_factors(cfg), sizes(cfg, world).local_tokens
    core_work = factors.core + _logit_products(cfg)
    act = _balanced(cfg, world)
    saved, head_saved = act.per_layer_kind(), act.head().saved
    refilled, actual = _refilled(cfg, act), Activations(cfg, world).per_layer_kind()
    rates = {fp8: _rates(cfg, machine, fp8) for fp8 in (False, True)}
    quantization = 1e12 * _quantized_bytes(cfg) / (machine.memory_gbs * 1e9)  # ps, like FLOP/rate
    copies = _weight_copies(cfg, world, machine)
    read, _ = _memory_ps(cfg, world, machine)
    none = Work((0.0, 0.0, 0.0), 0.0, 0.0, 0.0, 0.0, 0, 0, 0, Counter(), tokens)
    wgrads, dense_waits = layer_wgrads(cfg, world, machine), waits(cfg)
    routed_waits = experts_wait(cfg, world)
    stages = [none for _ in range(cfg.parallel.pipeline)]

    def of_chunk(chunk: Chunk) -> tuple[float, ...]:
        """Seconds of GEMMs, experts, core attention, delayed ones; saved, restored, offloaded."""
        kinds, head = chunk.kinds, chunk.heads
        sparse = [kind for kind in kinds if not kind.dense]
        gemm = head * f.head / machine.head_tflops
        gemm += chunk.mtp * f.mtp_projection / machine.dense_tflops
        delayed = dense_waits * gemm / 3
        for kind in kinds:
            mlp = factors.mlp * f.mlp if kind.dense else factors.shared * f.shared
            gemm += (factors.projections * f.projections + mlp) / rates[kind.fp8].dense
            gemm += copies[kind].dense
            wgrad = wgrads[kind]
            delayed += dense_waits * (wgrad.attention + wgrad.mlp) + routed_waits * wgrad.experts
        experts = sum(kind.fp8 for kind in sparse) * quantization
        for kind in sparse:
            rows = (factors.routed - 1 / 3) * f.routed / rates[kind.fp8].experts
            experts += max(rows, read) + wgrads[kind].experts + copies[kind].experts
        core = core_work * len(kinds) * f.core / machine.attention_tflops
        return (
            *(tokens * part / 1e12 for part in (gemm, experts, core, delayed)),
            sum([saved[kind].saved for kind in kinds]) + head * head_saved,
            sum([refilled[kind] for kind in kinds]),
            sum([actual[kind].offloaded for kind in kinds]),
        )

    known: dict[tuple[object, ...], tuple[float, ...]] = {}
    for chunk in chunks(cfg):
        if chunk[1:] not in known:  # most chunks have the same layers
            known[chunk[1:]] = of_chunk(chunk)
        more, before, sparse = known[chunk[1:]], stages[chunk.stage], chunk.sparse
        stages[chunk.stage] = Work(
            (
                before.seconds[0] + more[0],
                before.seconds[1] + more[1],
                before.seconds[2] + more[2],
            ),
            before.delayed + more[3],
            before.written + more[4],
            before.refilled + more[5],
            before.offloaded + more[6],
            before.layers + len(chunk.kinds),
            before.mlps + len(chunk.kinds) - (0 if cfg.model.moe.shared_ffn else sparse),
            before.sparse + sparse,
            before.mixers + chunk.mixers,
            tokens,
        )
    return stages


_FP8_PASSES = 5.5
"""Bytes read and written to quantise and transpose the rows of an expert, per channel of x, gate
and up, forward and backward. Fitted, with `expert_fp8_tflops` for the products, to steps of four
models in bf16 and FP8 (tests/moe/plan/test_fp8_gain.py); of the kernels alone it is 5 %
optimistic for experts of 2048 x 768 (docs/measured/kernels/fp8.json)."""


def _quantized_bytes(cfg: Config) -> float:
    """Bytes of a token and MoE layer that quantisation reads and writes, where products are FP8."""
    m = cfg.model
    if not multiplies_fp8(cfg):
        return 0.0
    channels = expert_hidden(m) + ACTIVATIONS[m.moe.activation].halves * m.moe.ffn
    return _FP8_PASSES * m.moe.top_k * channels


_FP8_COPY = 3.9 / 3.0
"""Rate at which weights are copied to FP8 over `Machine.memory_gbs`, on an H200
(docs/measured/training/four_h200s.md)."""


class _CopyTimes(NamedTuple):
    """Picoseconds of a token for FP8 copies of weights in a layer."""

    experts: float
    dense: float


def _weight_copies(cfg: Config, world: int, machine: Machine) -> dict[LayerKind, _CopyTimes]:
    """Times of each kind of layer.

    Copies are made once a step, or for each use: by products forward and for the gradients of
    rows, which are all but those of weight gradients, a third of the work without recomputation.
    """
    rate = _FP8_COPY * sizes(cfg, world).local_tokens * machine.memory_gbs / 1e3
    factors, found = _work_factors(cfg), {}
    for kind, weights in fp8_weights_by_kind(cfg, world).items():
        if kind.resident:  # two bytes are read, and one is written for each layout
            experts = dense = 4 / micro_batches(cfg, world)
        else:
            experts, dense = (3 * (3 * part - 1) for part in (factors.routed, factors.projections))
        found[kind] = _CopyTimes(experts * weights.experts / rate, dense * weights.dense / rate)
    return found


class Wgrads(NamedTuple):
    """Picoseconds of a token's weight gradients in one layer: a third of its products."""

    attention: float  # projections
    mlp: float  # dense MLP or shared experts
    experts: float  # with the passes over their sums, which overlap products in part


def layer_wgrads(cfg: Config, world: int, machine: Machine) -> dict[LayerKind, Wgrads]:
    """Weight gradients of the kinds of layers in a model with resolved kernels."""
    f, (_, summed) = flops(cfg), _memory_ps(cfg, world, machine)
    with_passes, found = beside_passes(cfg), {}
    for kind in set(all_kinds(cfg)):
        rates = _rates(cfg, machine, kind.fp8)
        mlp = (f.mlp if kind.dense else f.shared) / rates.dense / 3
        experts = 0.0 if kind.dense else with_passes(f.routed / rates.experts / 3, summed)
        found[kind] = Wgrads(f.projections / rates.dense / 3, mlp, experts)
    return found


def beside_passes(cfg: Config) -> Callable[[float, float], float]:
    """Time of weight gradients from those of their products and of passes over their sums.

    They overlap in part; rates that a backend has of its own include passes of their sizes.
    """
    return max if expert_backend(cfg.kernels.backend).machine_rates else hypot


class ExpertBytes(NamedTuple):
    """Bytes of a rank's experts of a layer that a micro-batch reads and writes.

    They take longer than the products themselves where experts have few rows.
    """

    weights: float  # reads by the products of the forward pass and of the gradients of rows
    sums: float  # reads and writes of the sums that weight gradients are added to


def expert_bytes(cfg: Config, world: int) -> ExpertBytes:
    """Bytes of one MoE layer; `cfg` has resolved kernels."""
    e = cfg.model.moe
    local = e.experts // expert_parallel_size(cfg, world)
    elements = local * expert_weights(cfg.model)
    passes = 0.5 if pairs(cfg, world) else 1  # over the sums, for a micro-batch
    return ExpertBytes(elements * 2 * width(cfg), elements * passes * 2 * grad_width(cfg))


def _memory_ps(cfg: Config, world: int, machine: Machine) -> ExpertBytes:
    """Picoseconds of a token in place of bytes."""
    rate = sizes(cfg, world).local_tokens * machine.memory_gbs / 1e3
    weights, sums = expert_bytes(cfg, world)
    return ExpertBytes(weights / rate, sums / rate)


def _logit_products(cfg: Config) -> float:
    """Work to measure the largest attention logits, as a fraction of core attention.

    Products of queries and keys are computed once more in the steps that measure them.
    """
    a, every = cfg.model.attention, logit_interval(cfg.optim)
    if not every:
        return 0.0
    key, value = head_dims(a)
    return key / (key + value) / 3 / every


class _WorkFactors(NamedTuple):
    projections: float
    core: float
    mlp: float
    shared: float
    routed: float


def _work_factors(cfg: Config) -> _WorkFactors:
    """Factors of recomputation by part of a layer.

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


def _refilled(cfg: Config, act: Activations) -> Counter[LayerKind]:
    """Bytes that selective recomputation restores, of a layer of each kind."""
    restored = Counter[LayerKind]()
    for name in cfg.run.recompute:
        if name in ("norm", "mla_up", "attention", "mlp"):
            restored.update(act.bytes_freed(name))
    return restored


class _Rates(NamedTuple):
    """TFLOP/s of a layer, forward and backward."""

    dense: float
    experts: float


def _rates(cfg: Config, machine: Machine, fp8: bool) -> _Rates:
    m, fast = machine, fp8 and multiplies_fp8(cfg)
    return _Rates(
        m.dense_fp8_tflops if fast and quantizes_dense(cfg) else m.dense_tflops,
        m.expert_fp8_tflops if fast else m.expert_tflops,
    )


def _balanced(cfg: Config, world: int) -> Activations:
    """Activations without recomputation and offloading, with balanced experts.

    Unused expert rows are never touched and so not counted.
    """
    run = replace(cfg.run, recompute=[], offload=[])
    parallel = replace(cfg.parallel, capacity_factor=1.0)
    return Activations(replace(cfg, run=run, parallel=parallel), world)
