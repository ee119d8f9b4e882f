"""Rates of the kernels of other stacks: measured on one H200, and scaled to the machine.

Sources: grouped products of Transformer Engine 2.20.2 with the activation between them, forward
and backward, of three local shapes; `configs.arithmetic.core_attention`.
"""

from dataclasses import replace

from phalanx.configs.arithmetic.core_attention import core_tflops
from phalanx.configs.arithmetic.expert_rates import by_size
from phalanx.configs.schema import Config, ModelConfig
from phalanx.configs.tables.machines import MACHINES, Machine
from phalanx.parallel.dispatcher.costs import GroupTopology, Links, TransportCosts

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
"""Reads and writes of a saved tensor by elementwise work without fusion, forward and backward."""


def peer_machine(cfg: Config, machine: Machine, attention: str) -> Machine:
    """The machine with the rates that others reach for the experts and attention of a model.

    Args:
        cfg: model and length of sequences.
        machine: rates of our kernels, whose ratio to those on an H200 scales the measurements.
        attention: library, a key of the measurements.
    """
    attention_tflops = core_tflops(cfg.model, cfg.data.sequence_length, attention, machine)
    return replace(with_grouped_products(cfg.model, machine), attention_tflops=attention_tflops)


def with_grouped_products(model: ModelConfig, machine: Machine) -> Machine:
    """The machine with the rates of Transformer Engine's products for experts of this model's size.

    In bf16 they are between measured ones by the size of a matrix.
    """
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

    Forward and backward, of a micro-batch. Published runs have these in `ELEMENTWISE_PASSES`.

    Args:
        model: with experts.
        machine: rate of memory.
        local: experts of a rank.
        rows: rows of a rank.
        fp8: products are in FP8.
    """
    biases = _BIAS_BYTES * rows * model.hidden if model.bias else 0
    return _OF_EXPERT[fp8] * local + biases / (machine.memory_gbs * 1e9)
