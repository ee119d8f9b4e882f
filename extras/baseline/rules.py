"""Facts of Megatron-Core's MoE layer: where it runs, its limits, fields, bytes and rates.

Rates are measured on one H200, and scaled to the machine. Sources: grouped products of Transformer
Engine 2.20.2 with the activation between them, forward and backward, of three local shapes;
`configs.arithmetic.rates`.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from phalanx.configs.arithmetic.layers import mixer_layers, mixer_of
from phalanx.configs.arithmetic.rates import by_size, core_tflops
from phalanx.configs.formats import fp8_row, is_fp8, is_microscaling, width
from phalanx.configs.knobs import pluralize, repair
from phalanx.configs.schema import Config, ModelConfig, PrecisionConfig
from phalanx.configs.tables.machines import MACHINES, Machine
from phalanx.kernels.availability import te
from phalanx.kernels.limits import Refusal
from phalanx.kernels.registry import Facts
from phalanx.moe.saved_tensors import SavedTensors, TokenCounts, hidden_bytes
from phalanx.parallel.dispatcher.costs import GroupTopology, Links, TransportCosts


def stock_experts(facts: Facts) -> Refusal:
    """Reason why Megatron-Core's MoE layer cannot run, or None."""
    if is_microscaling(facts.recipe):
        return f"has no {facts.recipe} here"
    why = te(facts) if facts.fp8 else None
    return why and f"has fp8_block by Transformer Engine: {why}"


def problems(cfg: Config) -> Iterator[str]:
    """Limits of Megatron-Core's layer with Transformer Engine's recipe."""
    if cfg.run.device == "cpu":
        reason = "has fp8_block by Transformer Engine, which needs CUDA, and run.device is cpu"
        yield repair(cfg, "kernels.backend", reason, "auto")
        return
    for name in mixer_layers(cfg.model):
        if refused := mixer_of(name).not_in_fp8_of_megatron(cfg.model):
            yield repair(cfg, "kernels.backend", refused, "auto")
            return
    for name in ("wgrad", "hidden", "dispatch", "weights"):
        if getattr(cfg.precision, name) != (default := getattr(PrecisionConfig(), name)):
            reason = "is not possible with kernels.backend=megatron"
            yield repair(cfg, f"precision.{name}", reason, default)
    most = cfg.model.layers // cfg.parallel.pipeline
    for name in ("bf16_first_layers", "bf16_last_layers"):
        if getattr(cfg.precision, name) > most:
            reason = f"is more than the {pluralize(most, 'layer')} of a stage, which "
            reason += "kernels.backend=megatron takes at most"
            yield repair(cfg, f"precision.{name}", reason, most)


def config_fields(cfg: Config) -> dict[str, Any]:
    """Fields of Transformer Engine's blockwise recipe, for Megatron-Core's own experts."""
    p = cfg.precision
    if not is_fp8(cfg):
        return {}
    return dict(
        fp8="hybrid" if p.grad_format == "e5m2" else "e4m3",
        fp8_recipe="blockwise",
        first_last_layers_bf16=p.bf16_first_layers + p.bf16_last_layers > 0,
        num_layers_at_start_in_bf16=p.bf16_first_layers,
        num_layers_at_end_in_bf16=p.bf16_last_layers,
    )


def described(packages: Collection[str]) -> str:
    """Its implementation of experts, by the optional packages that all ranks have."""
    with_te = "transformer_engine" in packages
    return "Transformer Engine's grouped GEMM" if with_te else "a loop over experts"


def saved_tensors(cfg: Config, counts: TokenCounts, *, fp8: bool) -> SavedTensors:
    """Saved bytes of the experts of a layer in FP8 or not, without the router's.

    Rows as received and sorted by expert, the activated product, and with biases the projection
    plus bias; in FP8 the transposed inputs of linear layers.
    """
    m, rows = cfg.model, counts.rows
    x, a = (fp8_row(n) if fp8 else width(cfg) * n for n in (m.hidden, m.moe.ffn))
    h = hidden_bytes(cfg, counts, fp8=fp8)
    return {"moe": h * (2 if m.bias else 1) + rows * x, "expert_a": rows * a}


_GROUPED: tuple[tuple[int, int, int, float], ...] = (
    (65536, 2048, 768, 1.918 + 2.553),  # Qwen3-30B-A3B on eight ranks
    (32768, 2880, 2880, 2.708 + 6.273),  # GPT-OSS-20B on eight ranks
    (65536, 7168, 2048, 9.159 + 19.560),  # DeepSeek-V3 on eight ranks
)
"""Rows, hidden size, width of an expert, and milliseconds forward and backward, smallest first."""
# The next three are fitted to the times in which a GPU is busy in steps of four models
# (docs/measured/training/fp8_slices_one_h200.md#with-fused-weight-gradients).
_FP8_TFLOPS = 1035.0  # rate of the products in FP8 without quantization, of any size
_OF_EXPERT = {False: 1.0e-5, True: 6.0e-5}
"""Seconds of an expert of a layer and micro-batch beside its products, forward and backward, in
bf16 and in FP8: each expert has kernels of its own, and quantizes by itself."""
_BIAS_BYTES = 130
"""Bytes that a row reads and writes for biases, per channel of the output: Megatron-Core adds them
to slices of the rows in fp32, and joins the slices."""
ELEMENTWISE_PASSES = 5.7
"""Reads and writes of a saved tensor by unfused elementwise work, both passes."""


def peer_machine(cfg: Config, machine: Machine, attention: str) -> Machine:
    """The machine with the rates that others reach for the experts and attention of a model.

    `machine` has rates of our kernels, whose ratio to those on an H200 scales the measurements.
    """
    attention_tflops = core_tflops(cfg.model, cfg.data.sequence_length, attention, machine)
    return replace(with_grouped_products(cfg.model, machine), attention_tflops=attention_tflops)


def with_grouped_products(model: ModelConfig, machine: Machine) -> Machine:
    """The machine with Transformer Engine's rates, in bf16 between measured ones by matrix size."""
    h200 = MACHINES["h200"]
    measured = [(d * f, 18e-9 * rows * d * f / ms) for rows, d, f, ms in _GROUPED]
    return replace(
        machine,
        expert_tflops=by_size(model, measured) * machine.expert_tflops / h200.expert_tflops,
        expert_fp8_tflops=_FP8_TFLOPS * machine.expert_fp8_tflops / h200.expert_fp8_tflops,
    )


def exchange_costs(cfg: Config, group: GroupTopology) -> TransportCosts:
    """Costs of its all-to-all, with a copy of the row for each expert."""
    copies = cfg.model.moe.top_k
    near, far = (group.node_ranks - 1) / group.ranks, 1 - 1 / group.nodes
    rows = Links(copies * near, copies * far)
    return TransportCosts(rows, rows)


def beside_products(
    model: ModelConfig, machine: Machine, *, local: int, rows: int, fp8: bool
) -> float:
    """Seconds of a layer of Megatron-Core's beside the products of its experts, in our trainer.

    Forward and backward, of a micro-batch of `rows` for `local` experts of a rank. Published runs
    have these in `ELEMENTWISE_PASSES`.
    """
    biases = _BIAS_BYTES * rows * model.hidden if model.bias else 0
    return _OF_EXPERT[fp8] * local + biases / (machine.memory_gbs * 1e9)
