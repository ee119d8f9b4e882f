"""Step time: work of the slowest stage over the rates of a machine, expected and at best.

Expected: GEMMs, core attention, elementwise work and the exchanges of experts, tensor ranks and
context ranks run one after another, as they do in this code; exchanges that overlap the experts,
weight gradients (`parallel.delay_wgrad`) or another micro-batch (`parallel.overlap_microbatches`)
are exposed in part, and GPUs that exchange wait for the slowest one. With `parallel.overlap`
gradients are reduced beside the last backward pass and parameters gathered beside the first forward
pass, but for those of the embedding. Uneven routing and host time are not counted.

At best: matrix products and core attention alone, with everything else overlapped, for any
transport. Other systems overlap exchanges with another micro-batch (DualPipe, arXiv 2412.19437;
Megatron-Core's combined 1F1B), so a sum of both would not be a bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from statistics import median

from phalanx.configs.arithmetic.layers import mixer_layers, mixer_of
from phalanx.configs.arithmetic.rates import core_tflops, with_wide_experts
from phalanx.configs.formats import grad_width, in_bf16, multiplies_fp8, width
from phalanx.configs.layout import (
    expert_parallel_size,
    may_be_uneven,
    micro_batches,
    optimizer_shards,
    replicas,
)
from phalanx.configs.remembered import STEP, remembered
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.capabilities import ZERO3
from phalanx.configs.tables.machines import Machine
from phalanx.configs.tables.optimizers import HOST_STATES, MOMENTS
from phalanx.moe.plan.cost.activations import sizes
from phalanx.moe.plan.cost.delayed_wgrad import waits
from phalanx.moe.plan.cost.exchange import (
    Exchange,
    core_layers,
    heads_seconds,
    heads_traffic,
    keys_traffic,
    own_exchange,
    rows_traffic,
    shard_seconds,
)
from phalanx.moe.plan.cost.pipeline import step_seconds
from phalanx.moe.plan.cost.stages import stage_memory
from phalanx.moe.plan.cost.traffic import Traffic, least_traffic, traffic
from phalanx.moe.plan.cost.weights import Weights, chunks, split_masters, stage_weights
from phalanx.moe.plan.cost.work import stage_work

GAPS = 1.5e-4
"""Seconds of a layer and micro-batch, forward and backward, in which a captured step computes
nothing: about 70 kernels begin and end. 0.11 to 0.18 ms of four models
(docs/measured/training/slices_one_h200.md)."""
_RECOMPUTE_PASSES = 6.0
"""Reads and writes of a recomputed tensor: its inputs, itself, and a copy to its old storage."""
_PASSES = 2.5
"""Reads and writes of a saved tensor by elementwise work, forward and backward. Norms, residuals
and the router take one pass each: 2.3 to 2.6 of three models, all that is neither products nor the
update (docs/measured/training/slices_one_h200.md)."""
_IN_STEPS = 0.83
"""Speed of core attention in a step, where other products have brought the GPU to its power limit,
over its speed alone: 0.80 to 0.88 of four models (the same file; docs/measured/kernels/libraries.md
has it alone)."""
_UPDATE_RATE = 1.3
"""Bytes a second of our AdamW's long passes over those of elementwise work: 3,800 to 4,100 GB/s on
an H200 (the same file)."""
_BESIDE_EXCHANGES = 0.99
"""Rate of experts beside exchanges on 8 SMs: 1.0 of Qwen3-30B-A3B, 0.96 or more of DeepSeek-V3
(docs/measured/training/pipelines_two_h100s.md, docs/measured/kernels/between_h100s.md)."""
_OVERLAPPED = 0.9  # part of a pass beside which parameters are gathered or gradients reduced
_NCCL_RATE = 1.6e12
"""Bytes a second that NCCL would move inside a node with all SMs, 12 GB/s each (docs/memory.md)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest stage."""

    gemm: float  # attention projections, dense MLPs, shared experts, output layer
    experts: float
    attention: float
    elementwise: float
    exchange: float  # exposed part of dispatch and combine of expert tokens
    heads: float  # all-to-all of heads between context ranks, of mixers without core attention
    tensor: float  # gathering and summing tokens around what tensor ranks share
    context: float  # gathering keys and values of the other context ranks
    gaps: float  # time between kernels
    offload: float  # exposed part of copies to and from host memory
    skew: float  # waiting for the slowest GPU at every exchange of expert tokens
    waiting: float  # pipeline bubble
    gradients: float  # exposed part of gradient reduction and parameter gathering
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Bound:
    """Lower bound of a step of a layout with any transport and overlap, at a machine's rates."""

    seconds: float
    limit: str  # the bottleneck: `matrix products`, `network` or `links inside a node`


_EXPERTS, _EXCHANGE = 1, 4
"""Places among the parts of a stage's time, which are in the order of `StepTime`."""


@remembered(*STEP, "parallel.delay_wgrad")
def step_time(cfg: Config, world: int, machine: Machine) -> StepTime:
    """Expected time of a step; `cfg` has resolved kernels."""
    own = with_own_kernels(cfg, machine)
    if cfg.parallel.overlap_microbatches == "on":
        bf16, fp8 = (_BESIDE_EXCHANGES * r for r in (own.expert_tflops, own.expert_fp8_tflops))
        own = replace(own, expert_tflops=bf16, expert_fp8_tflops=fp8)
    sent, beside = own_exchange(cfg, world, own), _beside_experts(cfg, world, own)
    step = step_with(sent, cfg, world, own, _PASSES, beside)
    # What is hidden, by itself, may not fit into the step together.
    missing = max(0.0, network_seconds(cfg, world, machine) - step.total)
    return replace(step, gradients=step.gradients + missing)


def _beside_experts(cfg: Config, world: int, machine: Machine) -> float:
    """Seconds of a MoE layer and micro-batch that a backend takes beside products and passes.

    Those of the fused experts are in their rates.
    """
    path = expert_backend(cfg.kernels.backend).beside_products
    if not path:
        return 0.0
    local, rows = cfg.model.moe.experts // expert_parallel_size(cfg, world), sizes(cfg, world).rows
    seconds: float = resolve_name(path)(
        cfg.model, machine, local=local, rows=rows, fp8=multiplies_fp8(cfg)
    )
    return seconds


_FP32_RATE = 0.1  # rate of products in fp32, which no tensor core multiplies, relative to bf16
PRODUCTS = ("dense_tflops", "head_tflops", "expert_tflops", "attention_tflops")


@remembered("model", "data.sequence_length", "kernels", "precision")
def with_own_kernels(cfg: Config, machine: Machine) -> Machine:
    """The machine with the rates of the dtype, `kernels.attention` and experts of such sizes."""
    own, slow = _with_sizes(cfg, machine), () if in_bf16(cfg) else PRODUCTS
    return replace(own, **{name: _FP32_RATE * getattr(own, name) for name in slow})


def _with_sizes(cfg: Config, machine: Machine) -> Machine:
    path = expert_backend(cfg.kernels.backend).machine_rates
    with_experts = resolve_name(path) if path else with_wide_experts
    machine = with_experts(cfg.model, machine)
    if not all(mixer_of(name).core for name in mixer_layers(cfg.model)):
        return machine  # its rate of core attention is that of such models
    library = {"te": "cudnn", "flex": "flex"}.get(cfg.kernels.attention, "fa4")
    alone = core_tflops(cfg.model, cfg.data.sequence_length, library, machine)
    return replace(machine, attention_tflops=_IN_STEPS * alone)


def step_with(
    sent: Exchange,
    cfg: Config,
    world: int,
    machine: Machine,
    passes: float,
    beside_experts: float = 0.0,
) -> StepTime:
    """Expected time of a step whose tokens travel by any exchange.

    By elementwise work saved tensors are read and written in so many `passes`, forward and
    backward, and a MoE layer and micro-batch takes so many seconds more `beside_experts`.
    """
    shards = shard_seconds(cfg, machine)
    seconds_of_heads = {name: heads_seconds(cfg, machine, name) for name in mixer_layers(cfg.model)}
    weights, added = stage_weights(cfg, world), _added_bytes(cfg)
    stages, works = [], stage_work(cfg, world, machine)
    for work, owned in zip(works, weights, strict=True):
        written = passes * work.written + _RECOMPUTE_PASSES * work.refilled
        written += added * (owned.dense + owned.expert)
        elementwise = written / (machine.memory_gbs * 1e9) + work.sparse * beside_experts
        heads = sum(n * seconds_of_heads[name] for name, n in work.mixers.items())
        moved = (work.sparse * sent.total, heads, shards.tensor(work), shards.context(work))
        sending = (work.tokens * each for each in moved)
        busy = (*work.seconds, elementwise, *sending, work.layers * GAPS)
        stages.append((*busy, _copies(sum(busy), work.offloaded, machine)))
    seconds = [sum(stage) for stage in stages]
    slow, count = max(stages, key=sum), micro_batches(cfg, world)
    parts = [count * t for t in slow]
    pipeline, virtual = cfg.parallel.pipeline, cfg.parallel.virtual_pipeline
    computing = max(seconds) - slow[_EXCHANGE]
    parts[_EXCHANGE] = sent.exposed(slow[_EXCHANGE], computing, count, pipeline, virtual)
    gradients = collectives(cfg, world, machine, weights, sum(slow), slow[_EXPERTS])
    delayed, held = [work.delayed for work in works], _held(cfg, world)
    total = step_seconds(seconds, count, virtual, delayed, held)
    waits = sent.skew * count * computing, total - count * max(seconds)
    return StepTime(*(*parts, *waits, gradients, update(cfg, world, machine, weights)))


def _added_bytes(cfg: Config) -> int:
    """Bytes of a parameter and micro-batch for gradients that a pass adds, not products."""
    if cfg.kernels.gradient_accumulation_fusion:
        return 0
    return 2 * width(cfg) + 2 * grad_width(cfg)


def _held(cfg: Config, world: int) -> list[int]:
    """Backward passes of each stage whose weight gradients wait beyond a transfer."""
    if not waits(cfg):
        return [0] * cfg.parallel.pipeline
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
    sent, machine = least_traffic(cfg, world), with_own_kernels(cfg, machine)
    bytes_ = sent.forward + sent.backward
    near, far = bytes_.near / machine.node_line_gbs, bytes_.far / machine.network_line_gbs
    stages, works = [], stage_work(cfg, world, machine)
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
    virtual, delayed = cfg.parallel.virtual_pipeline, [work.delayed for work in works]
    count, held = micro_batches(cfg, world), _held(cfg, world)
    total = step_seconds(seconds, count, virtual, delayed, held)
    total += update(cfg, world, machine, stage_weights(cfg, world))
    at_line_rate = replace(machine, network_gbs=machine.network_line_gbs)
    line = network_seconds(cfg, world, at_line_rate, sent)
    if line > total:
        return Bound(line, "network")
    return Bound(total, max(slow, key=lambda name: slow[name]))


def collectives(
    cfg: Config,
    world: int,
    machine: Machine,
    weights: Sequence[Weights],
    busy: float,
    experts: float,
) -> float:
    """Exposed seconds of gradient reduction and parameter gathering.

    Nothing runs beside those of the embedding, which is read first and whose gradient comes last
    (docs/measured/training/four_h200s.md). A micro-batch is `busy` seconds, some of `experts`.
    """
    p, m, near = cfg.parallel, cfg.model, world <= machine.node_gpus
    rate = 1e9 * (machine.node_gbs if near else machine.network_gbs)
    sent = _reduced(cfg, world, weights)
    embedding = m.vocab_size * m.hidden / p.tensor * (1 - 1 / replicas(cfg, world)[0])
    # Inside a node a bucket takes milliseconds, as experts do, and its kernel waits for theirs,
    # which hold all SMs. Over a network it goes on beside several of them.
    beside = busy - (experts if near else 0.0)
    hidden = _OVERLAPPED * beside if p.overlap else 0.0
    zero3 = p.distributed_optimizer in ZERO3
    times = micro_batches(cfg, world) if zero3 else 1
    # Ranks of a node read weights by copy engines, and sum gradients with SMs of the products.
    of_sms = times * sent * grad_width(cfg) / _NCCL_RATE if zero3 and near else 0.0
    return of_sms + sum(
        max(embedding * each / rate, times * (sent * each / rate - hidden * part))
        for part, each in _widths(cfg)
    )


def _reduced(cfg: Config, world: int, weights: Sequence[Weights]) -> float:
    """Elements that a rank of the stage with most sends to others that have the same."""
    dense, experts = (1 - 1 / ranks for ranks in replicas(cfg, world))  # parts that others have
    return max(w.dense * dense + w.expert * experts for w in weights)


def _widths(cfg: Config) -> list[tuple[float, int]]:
    """Bytes of an element beside a backward pass, two thirds of the work, and a forward pass."""
    if cfg.parallel.distributed_optimizer in ZERO3:
        return [(2 / 3, grad_width(cfg) + width(cfg)), (1 / 3, width(cfg))]
    if cfg.parallel.distributed_optimizer:
        return [(2 / 3, grad_width(cfg)), (1 / 3, width(cfg))]
    return [(2 / 3, 2 * grad_width(cfg))]


def network_seconds(
    cfg: Config, world: int, machine: Machine, sent: Traffic | None = None
) -> float:
    """Seconds of a step in which a GPU of the busiest stage sends over the network.

    Expert tokens, rows of tensor ranks, keys and values or heads of context ranks, activations
    between stages, gradients and parameters, at `Machine.network_gbs`. `sent`: of tokens, by
    default with the transport's.
    """
    if world <= machine.node_gpus:
        return 0.0
    sent, stages = sent or traffic(cfg, world), [0.0] * cfg.parallel.pipeline
    keys, rows = keys_traffic(cfg, machine).far, rows_traffic(cfg, machine).far
    heads = {name: heads_traffic(cfg, machine, name).far for name in mixer_layers(cfg.model)}
    between = 2 * cfg.model.hidden * width(cfg) if len(stages) > 1 else 0  # there and back
    for chunk in chunks(cfg):
        stages[chunk.stage] += chunk.sparse * (sent.forward.far + sent.backward.far) + between
        exchanged = sum(n * heads[name] for name, n in chunk.mixers.items())
        stages[chunk.stage] += exchanged + core_layers(chunk.mixers) * keys
        mlps = len(chunk.kinds) if cfg.model.moe.shared_ffn else chunk.dense
        stages[chunk.stage] += (len(chunk.kinds) + mlps) * rows
    bytes_ = micro_batches(cfg, world) * sizes(cfg, world).local_tokens * max(stages)
    reduced = _reduced(cfg, world, stage_weights(cfg, world))
    bytes_ += reduced * sum(each for _, each in _widths(cfg))
    return bytes_ / (machine.network_gbs * 1e9)


def update(
    cfg: Config, world: int, machine: Machine, weights: Sequence[Weights], *, copies: bool = True
) -> float:
    """Seconds of the update on the slowest stage, with `copies` of states in host memory."""
    of_dense, of_experts = optimizer_shards(cfg, world)
    longest = 0.0
    for w in weights:
        gradients = grad_width(cfg) * (w.dense / of_dense + w.expert / of_experts)
        # Moments and master weights are read and written, gradients read and normed. A third pass
        # over gradients is fitted to steps with fp32 moments; those in bf16 have a kernel of ours,
        # which reads the upper halves of weights too.
        touched, speedup = 2.0 * w.optimizer_bytes + 3 * gradients, 1.0
        if split_masters(cfg):
            touched, speedup = 8 / 3 * w.optimizer_bytes + 2 * gradients, _UPDATE_RATE
        touched += w.whole.touched
        seconds = touched / (speedup * machine.memory_gbs * 1e9)
        seconds += w.whole.flops / (machine.dense_tflops * 1e12)
        longest = max(longest, seconds)
    if copies and MOMENTS[cfg.optim.moments].hosted:
        longest = max(longest, resolve_name(HOST_STATES).seconds(cfg, world, machine))
    return longest


BUSIEST: dict[str, float] = {
    "deepseek_v3_l4": 1.36,
    "gpt_oss_20b": 1.11,
    "mixtral_8x7b": 1.81,
    "moonlight_16b_a3b": 1.15,
    "qwen3_30b_a3b": 1.26,
}


def busiest(cfg: Config, world: int) -> float:
    """Rows of the busiest rank over the mean, for which all ranks of a group wait.

    Measured as what natural routing costs runs of five models beside the same runs with balanced
    experts, or the median of all: steps 41 to 50 from scratch (docs/measured/training/own_*.yaml),
    the mean of three such pairs of 22 and 27 November 2026, and of Mixtral of one in FP8, with two
    experts on a rank. Routers that have trained for longer are more even: 1.07 on eight ranks
    (docs/measured/training/routing_load.md). 1 where all experts of a layer are on one rank, or
    routing is balanced by force.
    """
    if not may_be_uneven(cfg, world):
        return 1.0
    return BUSIEST.get(cfg.model.name, median(BUSIEST.values()))


def with_natural_routing(step: StepTime, load: float) -> StepTime:
    """A step whose busiest rank computes and exchanges `load` times the mean rows."""
    return replace(step, experts=load * step.experts, exchange=load * step.exchange)
