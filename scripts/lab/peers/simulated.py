"""Speed of a published run by the estimate, beside the published one.

Rates of kernels are measured, those of dispatchers published. What neither says is `FITTED`: to the
records that are not held (`stack.is_held`).
"""

from dataclasses import dataclass, replace

from phalanx.configs.arithmetic.layers import mlp_layers
from phalanx.configs.formats import is_fp8
from phalanx.configs.knobs import changed
from phalanx.configs.layout import expert_parallel_size, micro_batches
from phalanx.configs.records import Published, configured
from phalanx.configs.schema import Config
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.machines import Machine, machine_named
from phalanx.configs.validate import validate
from phalanx.extras.baseline.rules import ELEMENTWISE_PASSES, beside_products, peer_machine
from phalanx.moe.plan.cost.activations import sizes
from phalanx.moe.plan.cost.step_time import StepTime, busiest, step_with, with_natural_routing
from phalanx.moe.plan.described import resolved
from phalanx.scripts.lab.peers.dispatchers import exchange_of
from phalanx.scripts.lab.peers.stack import Stack, stack_of

_DENSE = 6  # channels of operands of attention's projections over the hidden size, about


@dataclass(frozen=True)
class Rates:
    """Rates of other stacks that nothing measured or published says."""

    early_ms: float = 5.0
    """Time in which a host launches a layer, forward and backward, without CUDA graphs, of what was
    measured before April 2026."""
    eager_ms: float = 5.0  # the same from then on
    graphs_ms: float = 0.0  # the same where graphs launch attention and router
    skew: float = 0.0  # `moe.plan.cost.exchange.Exchange.skew`
    cast_bytes: float = 0.0
    """Reads and writes to scale and cast tensors to FP8, of a channel of a product's operand."""
    alltoall: float = 1.0  # part of the rates of links that an all-to-all of NCCL reaches


FITTED = Rates(
    early_ms=15.0, eager_ms=12.0, graphs_ms=6.5, skew=0.06, cast_bytes=30.0, alltoall=1.0
)
"""The result of `fit.fitted`."""


@dataclass(frozen=True)
class Simulated:
    """A published run and its estimate."""

    record: Published
    step: StepTime
    tokens: float  # expected tokens a second and GPU

    @property
    def error(self) -> float:
        """Part by which the estimate is above the published rate."""
        return self.tokens / self.record.tokens_per_second_per_gpu - 1


@dataclass(frozen=True)
class Run:
    """A record as a configuration, with all that the rates do not change."""

    record: Published
    cfg: Config
    known: Config  # without `auto`
    world: int
    machine: Machine
    stack: Stack


def simulated(record: Published) -> Simulated:
    """The estimate of a record that says its `stack`, or ValueError."""
    return estimate(described(record), FITTED)


def described(record: Published) -> Run:
    """A record that says its `stack` as a run here, or ValueError."""
    stack = stack_of(record)
    cfg, world = configured(record)
    kind = record.hardware.split(" x ")[1].lower()
    cfg = changed(cfg, {"kernels.backend": "megatron", "run.machine": kind})
    validate(cfg, world)
    machine = machine_named(kind)
    return Run(record, cfg, resolved(cfg, world, machine.node_gpus), world, machine, stack)


def estimate(run: Run, rates: Rates) -> Simulated:
    """The speed of a run by these rates."""
    step, data = _step(run, rates), run.cfg.data
    tokens = data.global_batch * data.sequence_length / run.world / step.total
    return Simulated(run.record, step, tokens)


def _step(run: Run, rates: Rates) -> StepTime:
    cfg, world, stack = run.cfg, run.world, run.stack
    sent = exchange_of(
        run.known, world, run.machine, stack.dispatcher, stack.overlap, rates.alltoall
    )
    machine = peer_machine(cfg, run.machine, stack.attention)
    if is_fp8(cfg):  # Transformer Engine has one recipe for all linear layers
        machine = replace(machine, dense_tflops=machine.dense_fp8_tflops)
    beside = _beside_products(run, rates)
    sent = replace(sent, skew=rates.skew)
    step = step_with(sent, run.known, world, machine, ELEMENTWISE_PASSES, beside)
    step = with_natural_routing(step, busiest(cfg, world))
    return replace(step, waiting=step.waiting + max(0.0, _launching(run, rates) - step.total))


def _beside_products(run: Run, rates: Rates) -> float:
    """Seconds of a MoE layer and micro-batch for biases, launches of experts, and casts."""
    m, fp8 = replace(run.cfg.model, bias=run.stack.biases), is_fp8(run.cfg)
    rows = sizes(run.known, run.world).rows
    local = m.moe.experts // expert_parallel_size(run.cfg, run.world)
    seconds = beside_products(m, run.machine, local=local, rows=rows, fp8=fp8)
    if run.stack.casts:
        channels = m.hidden + (ACTIVATIONS[m.moe.activation].halves + 1) * m.moe.ffn
        operands = rows * channels + _DENSE * m.hidden * sizes(run.known, run.world).local_tokens
        seconds += rates.cast_bytes * operands / (run.machine.memory_gbs * 1e9)
    return seconds


def _launching(run: Run, rates: Rates) -> float:
    """Seconds in which the host of the stage with most layers launches a step."""
    layers = -(-sum(mlp_layers(run.cfg.model)) // run.cfg.parallel.pipeline)
    eager = rates.early_ms if run.stack.early else rates.eager_ms
    each = rates.graphs_ms if run.stack.graphs else eager
    return layers * micro_batches(run.cfg, run.world) * each / 1e3
