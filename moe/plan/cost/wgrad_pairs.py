"""Weight gradients of two micro-batches in one pass over their sums: where they can be, and gain.

With few rows for each expert the kernels of weight gradients take longer to read and write the sums
than to multiply; two micro-batches in one pass halve that traffic, and keep the operands of one
more micro-batch.
"""

from phalanx.configs.arithmetic.expert_rates import with_wide_experts
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import grad_width, multiplies_fp8
from phalanx.configs.layout import expert_parallel_size, micro_batches, replica_slots
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.cost.activations import sizes
from phalanx.moe.plan.cost.delayed_wgrad import (
    AUTO,
    OFF,
    ON,
    PAIRS,
    beside_exchanges,
    not_accumulated,
    refusal,
)
from phalanx.moe.plan.cost.traffic import costs


def pairs_refusal(cfg: Config, world: int) -> str:
    """Reason why no weight gradients of two micro-batches are computed together; empty if some are.

    Args:
        cfg: valid, with resolved kernels, transport and `parallel.overlap_microbatches`.
        world: ranks.
    """
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
    return ""


def pairs(cfg: Config, world: int) -> bool:
    """True if weight gradients of experts are computed for two micro-batches together.

    Args:
        cfg: valid, with resolved kernels and `parallel.delay_wgrad`.
        world: ranks.
    """
    return cfg.parallel.delay_wgrad == PAIRS and not pairs_refusal(cfg, world)


def sums_to_products(cfg: Config, world: int, machine: Machine) -> float:
    """Time to read and write the sums of an expert's weight gradients, over that of its products.

    Args:
        cfg: valid, with resolved kernels.
        world: ranks.
        machine: rates.
    """
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

    Args:
        cfg: valid, with resolved kernels, transport and `parallel.overlap_microbatches`.
        world: ranks.
        machine: rates.
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
