"""Expected time of a step: work of the slowest stage over the rates of a machine.

GEMMs, core attention, elementwise work and the exchange of experts follow one another; of pushes
beside the experts (`parallel.comm_sms`) only a part is waited for. Gradient reduction hides behind
all that where `parallel.overlap` is on. Stragglers, uneven routing and the host are left out: a run
is slower than this, not faster.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from configs.layout import (
    data_parallel_size,
    expert_parallel_size,
    micro_batches,
    pipeline_chunks,
    stage_ranks,
)
from configs.machines import Machine
from configs.schema import Config
from moe.accounting import flops_per_token
from moe.estimate.activations import Activations, sizes
from moe.estimate.pipeline import bubble
from moe.estimate.traffic import one_sided, traffic
from moe.estimate.weights import dense_layers, halves, stage_weights


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
    waiting: float
    """Pipeline bubble."""
    gradients: float
    """Reduction and parameter gathering that nothing hides."""
    optimizer: float

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(vars(self).values())


def step_time(cfg: Config, world: int, machine: Machine) -> StepTime:
    """Of a step; `cfg` has resolved kernels."""
    slow = max(_stages(cfg, world, machine), key=sum)
    gemm, experts, attention, elementwise, exchange = (micro_batches(cfg, world) * t for t in slow)
    busy = gemm + experts + attention + elementwise + exchange
    reduction, update = _update(cfg, world, machine)
    if cfg.parallel.overlap:
        # The last micro-batch's backward pass is what there is to hide behind.
        reduction = max(0.0, reduction - 0.6 * busy / micro_batches(cfg, world))
    waiting = bubble(cfg, world) * busy
    return StepTime(gemm, experts, attention, elementwise, exchange, waiting, reduction, update)


class _Flops(NamedTuple):
    """Forward and backward of a token, without recomputation."""

    projections: float
    """Of one attention."""
    core: float
    """Of one core attention, on average over the layers."""
    mlp: float
    """Of one dense MLP."""
    routed: float
    shared: float
    head: float
    """Output layer, of all losses."""
    joining: float
    """What a prediction layer has beside a layer."""


def _flops(cfg: Config) -> _Flops:
    """`moe.accounting.flops_per_token` by part."""
    m, e = cfg.model, cfg.model.moe
    linear, whole = flops_per_token(m, 0), flops_per_token(m, cfg.data.sequence_length)
    layers = m.layers + m.mtp_layers
    matrix = 6.0 * m.hidden * (2 if e.activation == "squared_relu" else 3)
    mlp, routed, shared = matrix * m.dense_ffn, matrix * e.ffn * e.top_k, matrix * e.shared_ffn
    head, joining = 6.0 * (1 + m.mtp_layers) * m.hidden * m.vocab_size, 12.0 * m.hidden**2
    rest = head + m.mtp_layers * joining + e.dense_layers * mlp
    rest += (layers - e.dense_layers) * (routed + shared)
    projections, core = (linear - rest) / layers, (whole - linear) / layers
    return _Flops(projections, core, mlp, routed, shared, head, joining)


def _stages(cfg: Config, world: int, machine: Machine) -> list[list[float]]:
    """Seconds of a micro-batch on each stage: GEMMs, experts, attention, elementwise, exchange."""
    f, how = _flops(cfg), cfg.run.recompute
    tokens = sizes(cfg, world).local_tokens  # tensor ranks share the work on a sequence
    all_again = 4 / 3 if how == "full" else 1.0
    moe_again = 4 / 3 if how in ("moe", "full") else 1.0
    core_again = 4 / 3 if how in ("attention", "full") else 1.0
    kept = _kept(cfg, world)
    stages = [[0.0] * 5 for _ in range(cfg.parallel.pipeline)]
    first = 0
    for i, letters in enumerate(pipeline_chunks(cfg)):
        dense, mtp, end = dense_layers(cfg, letters, first), letters.count("m"), letters.count("L")
        first += letters.count("t")
        sparse = letters.count("t") - dense + mtp
        gemm = all_again * ((dense + sparse) * f.projections + dense * f.mlp)
        gemm += moe_again * sparse * f.shared + end * f.head + mtp * f.joining
        written = dense * kept[0] + sparse * kept[1] + end * kept[2]
        seconds = (
            tokens * gemm / (machine.dense_tflops * 1e12),
            tokens * moe_again * sparse * f.routed / (machine.expert_tflops * 1e12),
            tokens * core_again * (dense + sparse) * f.core / (machine.attention_tflops * 1e12),
            _PASSES * written / (machine.memory_gbs * 1e9),
            tokens * sparse * _exchange(cfg, world, machine),
        )
        stage = i % cfg.parallel.pipeline
        stages[stage] = [a + b for a, b in zip(stages[stage], seconds, strict=True)]
    return stages


_PASSES = 6.0
"""Times that what a layer keeps is written or read by elementwise work, forward and backward."""


_WAITED = 0.25
"""Of pushes beside the experts (kernels/sm90/NOTES.md, "exposed")."""


def _exchange(cfg: Config, world: int, machine: Machine) -> float:
    """Seconds a token and MoE layer; the network and the links inside a node take turns."""
    sent = traffic(cfg, world)
    near, far = sent.forward + sent.backward - sent.network, sent.network
    if one_sided(cfg) and cfg.parallel.comm_sms:
        near *= _WAITED
    if cfg.parallel.dispatch == "alltoall" and cfg.kernels.backend != "megatron":
        # Half of the passes are all-gathers, in which a row enters a host once.
        far = far / 2 * (1 + 1 / machine.node_gpus)
    return near / (machine.node_gbs * 1e9) + far / (machine.network_gbs * 1e9)


def _kept(cfg: Config, world: int) -> tuple[int, int, int]:
    """Activation bytes of a dense layer, a MoE layer and the ends if nothing is recomputed.

    Of experts, rows that tokens take; others are never touched.
    """
    run, parallel = replace(cfg.run, recompute="none"), replace(cfg.parallel, capacity_factor=1.0)
    act = Activations(replace(cfg, run=run, parallel=parallel), world)
    return act.dense_layer().saved, act.moe_layer().saved, act.head().saved


def _update(cfg: Config, world: int, machine: Machine) -> tuple[float, float]:
    """Seconds of gradient reduction with parameter gathering, and of the optimizer."""
    p = cfg.parallel
    link = machine.node_gbs if world <= machine.node_gpus else machine.network_gbs
    replicas = data_parallel_size(cfg, world) * p.context
    copies = stage_ranks(cfg, world) // expert_parallel_size(cfg, world)
    grad, param = 2 if p.grad_dtype == "bf16" else 4, 2 if cfg.run.precision == "bf16" else 4
    each = grad + param if p.distributed_optimizer else 2 * grad
    reduction = update = 0.0
    for w in stage_weights(cfg, world):
        sent = w.dense * (replicas - 1) / replicas + w.expert * (copies - 1) / copies
        reduction = max(reduction, sent * each / (link * 1e9))
        # Moments and master weights are read and written; gradients also cleared and measured.
        state = w.optimizer_bytes * (4 / 3 if halves(cfg) else 1)  # with masters' upper halves
        touched = 2 * state + 3 * w.gradient_bytes
        update = max(update, touched / (machine.memory_gbs * 1e9))
    return reduction, update
