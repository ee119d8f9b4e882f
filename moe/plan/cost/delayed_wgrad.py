"""Weight gradients that wait, for transfers or for those of the next micro-batch.

With few rows for each expert the kernels of weight gradients take longer to read and write the sums
than to multiply; two micro-batches in one pass halve that traffic, and keep the operands of one
more micro-batch.

Legend: T tokens of a rank before sequence parallelism splits them, N received tokens, S expert
rows, D hidden, F expert width, H = 2F if gated.
"""

from collections.abc import Iterable
from itertools import chain

from phalanx.configs.arithmetic.layers import expert_hidden, has_experts, mixer_of
from phalanx.configs.arithmetic.rates import with_wide_experts
from phalanx.configs.formats import grad_width, multiplies_fp8, width
from phalanx.configs.layout import expert_parallel_size, micro_batches, replica_slots
from phalanx.configs.schema import Config
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.capabilities import ZERO3
from phalanx.configs.tables.layers import MIXERS
from phalanx.configs.tables.machines import Machine
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.moe.plan.cost.activations import sizes
from phalanx.moe.plan.cost.traffic import costs
from phalanx.moe.plan.cost.weights import LayerKind
from phalanx.moe.saved_tensors import TokenCounts, saves_fp8_inputs

AUTO, OFF, ON, PAIRS = "auto", "off", "on", "pairs"  # values of `parallel.delay_wgrad`


def refusal(cfg: Config) -> str:
    """Reason why no weight gradient can wait for transfers; empty if some can.

    Kernels and `parallel.overlap_microbatches` of `cfg` are resolved.
    """
    if cfg.parallel.pipeline == 1:
        return "there is one pipeline stage"
    if cfg.parallel.overlap_microbatches == "on":
        return "micro-batches overlap"
    return not_accumulated(cfg)


def not_accumulated(cfg: Config) -> str:
    """Reason why backward passes return weight gradients; empty if they add them to buffers."""
    if not expert_backend(cfg.kernels.backend).delays_wgrad:
        return f"kernels={cfg.kernels.backend} computes them in the backward pass"
    if not cfg.kernels.gradient_accumulation_fusion:
        return "kernels.gradient_accumulation_fusion=false returns them from the backward pass"
    return ""


def beside_exchanges(cfg: Config) -> bool:
    """True if weight gradients wait for the next exchange of the backward pass, and hide it.

    Their operands are those of one layer at most, which is about what the exchange needs later.
    """
    p, transport = cfg.parallel, TRANSPORTS.get(cfg.parallel.dispatch)
    if p.pipeline > 1 and p.overlap_microbatches != "on":
        return False
    if p.delay_wgrad == OFF or transport is None:
        return False
    return transport.collective and has_experts(cfg.model) and not not_accumulated(cfg)


def waits(cfg: Config) -> bool:
    """True if weight gradients wait for a pipeline's transfers."""
    return cfg.parallel.delay_wgrad in (ON, PAIRS) and not refusal(cfg)


def experts_wait(cfg: Config, world: int) -> bool:
    """True if those of the routed experts are among them.

    Not where a one-sided transport reuses its buffers of received rows, nor with replicas, whose
    gradients are sent.
    """
    return waits(cfg) and not costs(cfg, world).buffers and not replica_slots(cfg, world)


def layer_operands(cfg: Config, world: int, counts: TokenCounts, kind: LayerKind) -> int:
    """Bytes of the operands of a layer's weight gradients that wait."""
    m, e, t = cfg.model, cfg.model.moe, cfg.parallel.tensor
    quantized = kind.fp8 and saves_fp8_inputs(cfg)
    routed_element = 1 if quantized else width(cfg)
    element = routed_element if cfg.precision.dense == "fp8" else width(cfg)
    halves, dense = ACTIVATIONS[e.activation].halves, m.dense_ffn if kind.dense else e.shared_ffn
    matrices = mixer_of(kind.mixer).matrices(m)
    mlp = [m.hidden, halves * dense, dense, m.hidden] if dense else []

    def channels(sides: Iterable[int]) -> int:
        """Tensor parallel ranks share the channels of heads and of F, not those of D."""
        return sum(side if side == m.hidden else side // t for side in sides)

    attention_element = element if MIXERS[kind.mixer].quantized else width(cfg)
    total = attention_element * channels(chain.from_iterable(matrices)) + element * channels(mlp)
    total *= counts.tokens
    return total + (expert_operands(cfg, counts, kind) if experts_wait(cfg, world) else 0)


def expert_operands(cfg: Config, counts: TokenCounts, kind: LayerKind) -> int:
    """Bytes of the operands of the weight gradients of a layer's routed experts."""
    if kind.dense:
        return 0
    m, e = cfg.model, cfg.model.moe
    quantized, halves = kind.fp8 and saves_fp8_inputs(cfg), ACTIVATIONS[e.activation].halves
    element = 1 if quantized else width(cfg)
    gathered = quantized or not expert_backend(cfg.kernels.backend).fuses_gather
    tokens = 2 * expert_hidden(m) * (counts.rows if gathered else counts.received)
    return element * (tokens + counts.rows * (halves + 1) * e.ffn)


def head_operands(cfg: Config, counts: TokenCounts) -> int:
    """Bytes of the operands of the output layer: gradients of all logits, and hidden states."""
    m = cfg.model
    rows = (1 + m.mtp_layers) * counts.tokens * width(cfg)
    return rows * (m.vocab_size // cfg.parallel.tensor + m.hidden)


def held_passes(stage: int, spare: int, operands: int) -> int:
    """Number of backward passes whose weight gradients wait beyond a transfer (ZB-H1).

    One for each stage before this one (from 0), which saves that many more micro-batches, but no
    more than fit into the `spare` bytes that this stage needs less than the one that needs most: a
    few percent of the bubble are not worth most of the memory. `operands` are bytes of one pass, of
    which one more is held in any case.
    """
    return stage if not operands else max(0, min(stage, spare // operands - 1))


def pairs_refusal(cfg: Config, world: int) -> str:
    """Reason why no weight gradients of two micro-batches are in one pass; empty if some are."""
    if not has_experts(cfg.model):
        return "the model has no experts"
    if reason := not_accumulated(cfg):
        return reason
    if micro_batches(cfg, world) == 1:
        return "a step has one micro-batch"
    if cfg.parallel.overlap_microbatches == "on":
        return "micro-batches overlap"
    if costs(cfg, world).buffers:
        return f"parallel.dispatch={cfg.parallel.dispatch} reuses its buffers of expert rows"
    if replica_slots(cfg, world):
        return "gradients of replicas are sent"
    if cfg.parallel.distributed_optimizer in ZERO3:
        return "parallel.distributed_optimizer=zero3 sums them after each micro-batch"
    return ""


def pairs(cfg: Config, world: int) -> bool:
    """True if weight gradients of experts are computed for two micro-batches together."""
    return cfg.parallel.delay_wgrad == PAIRS and not pairs_refusal(cfg, world)


def sums_to_products(cfg: Config, world: int, machine: Machine) -> float:
    """Time to read and write the sums of an expert's weight gradients over its products'."""
    ranks = expert_parallel_size(cfg, world)
    local = max(1, cfg.model.moe.experts // ranks)
    rows = sizes(cfg, world).local_tokens * cfg.model.moe.top_k / local  # of an expert, balanced
    own = with_wide_experts(cfg.model, machine)
    rate = own.expert_fp8_tflops if multiplies_fp8(cfg) else own.expert_tflops
    # Of an element of the gradient: both are read and written once, and 2 FLOP a row.
    return (2 * grad_width(cfg) / (machine.memory_gbs * 1e9)) / (2 * rows / (rate * 1e12))


def possible(cfg: Config, world: int, machine: Machine) -> tuple[list[str], str]:
    """Values of `parallel.delay_wgrad` without `auto`, the best first, and why not what was asked.

    Each needs less memory than the one before it; a value that was asked for is alone.
    """
    wanted = cfg.parallel.delay_wgrad
    waits, together = refusal(cfg), pairs_refusal(cfg, world)
    without_pairs = ON if beside_exchanges(cfg) or not waits else OFF
    if wanted == PAIRS and together:
        return [without_pairs], together
    if wanted == AUTO and not waits:
        gains = expert_backend(cfg.kernels.backend).pairs_wgrad and not together
        gains = gains and sums_to_products(cfg, world, machine) > 1
        return [*([PAIRS] if gains else []), ON, OFF], ""
    if wanted in (AUTO, ON) and waits:
        return [without_pairs], waits
    return [wanted], ""
