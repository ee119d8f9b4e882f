"""How far an expected step may be off, and which rates of its machine were measured."""

from collections.abc import Iterator

from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.capture import CAPTURED
from phalanx.configs.formats import in_bf16, is_fp8
from phalanx.configs.layout import micro_batches
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.configs.tables.capabilities import ZERO3
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.cost.step_time import PRODUCTS

ON_ONE_HOST = 0.05
"""Error of steps on one host by rates that were measured there: of 0.97 to 1.05 times the expected
time (tests/moe/plan/cost/test_measured_steps.py)."""
LESS_KNOWN = 0.12
"""Error there with sequences longer than those steps have, or sharded parameters: 0.90 and 1.05 of
the expected time (docs/proof/long_context.md, docs/memory.md), one step each."""
_LONG = 8192  # tokens of a sequence
PUBLISHED = 0.22
"""Error within which all but one of the held benchmarks of others are: docs/published/simulated.md.
"""
BUSY = 0.6
"""Part of a step from which on a busy network is named: what hides its transfers is short then."""
_KERNELS = 70  # of a layer and micro-batch, forward and backward (moe.plan.cost.step_time.GAPS)
_SHOWN = {
    "dense_tflops": "GEMM",
    "head_tflops": "output layer",
    "expert_tflops": "experts",
    "dense_fp8_tflops": "FP8 GEMM",
    "expert_fp8_tflops": "FP8 experts",
    "attention_tflops": "attention",
    "memory_gbs": "memory",
    "node_gbs": "node",
    "network_gbs": "network",
    "latency_us": "latency of the network",
}
_LINKS = {"node_gbs", "network_gbs", "latency_us"}  # which a check of a cluster measures


def error_of(cfg: Config, world: int, machine: Machine) -> tuple[float, str]:
    """Part by which the speed may be off, and where that is from."""
    used, measured = _used(cfg, world, machine), _measured(cfg, machine)
    why, name = "as published runs are by the same estimate", cfg.kernels.backend
    facts = EXPERT_BACKENDS.get(name) if has_experts(cfg.model) else None
    if facts and facts.host_counts and not facts.machine_rates:  # a loop over experts
        return PUBLISHED, f"{why}, and slower, since these are rates of other experts than {name}"
    if used <= measured and world <= machine.node_gpus:
        if cfg.data.sequence_length > _LONG or cfg.parallel.distributed_optimizer in ZERO3:
            return LESS_KNOWN, "as the one such step was that we measured on one host"
        return ON_ONE_HOST, "as steps of ours were, by measured rates on one host"
    if not (used - _LINKS) & measured:
        return PUBLISHED, f"{why}, and more, since every rate of the GPU is an assumption"
    return PUBLISHED, why


def span(cfg: Config, world: int, machine: Machine, tokens: float) -> str:
    """A range of tokens a second and GPU around the expected ones."""
    error, why = error_of(cfg, world, machine)
    low, high = tokens / (1 + error), tokens * (1 + error)
    return f"{low:,.0f} to {high:,.0f} tokens/s/GPU, {error:.0%} off either way {why}"


def lines(cfg: Config, world: int, machine: Machine, tokens: float) -> Iterator[str]:
    """Lines of the page under the expected step."""
    yield f"range     {span(cfg, world, machine, tokens)}"
    used, measured = _used(cfg, world, machine), _measured(cfg, machine)
    for word, names in (("measured", used & measured), ("assumed", used - measured)):
        if names:
            yield f"{word:<10}{', '.join(text for name, text in _SHOWN.items() if name in names)}"
    if cfg.run.graph != CAPTURED:
        layers = -(-(cfg.model.layers + cfg.model.mtp_layers) // cfg.parallel.pipeline)
        launches = _KERNELS * layers * micro_batches(cfg, world)
        seconds, rate = launches * machine.launch_us / 1e6, f"{machine.launch_us:g} us"
        word = "measured" if "launch_us" in measured else "assumed"
        yield f"host      launches of a stage take {seconds:.3f} s, at {rate} each ({word})"


def _measured(cfg: Config, machine: Machine) -> frozenset[str]:
    return machine.measured if in_bf16(cfg) else machine.measured - {*PRODUCTS}


def _used(cfg: Config, world: int, machine: Machine) -> frozenset[str]:
    """Rates that a step depends on."""
    left_out = set()
    if not is_fp8(cfg):
        left_out |= {"dense_fp8_tflops", "expert_fp8_tflops"}
    if world <= machine.node_gpus:
        left_out |= {"network_gbs", "latency_us"}
    if world == 1:
        left_out.add("node_gbs")
    if not machine.latency_us:
        left_out.add("latency_us")
    return frozenset(_SHOWN) - left_out
