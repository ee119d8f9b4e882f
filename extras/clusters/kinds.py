"""GPUs that nothing of ours has run on: memory as the driver reports it, rates by assumption.

A rate keeps the part of its data sheet that H100s or H200s reach, unless a source is named.
"""

from dataclasses import replace

from phalanx.configs.tables.machines import MACHINES, Machine

_H100, _H200 = MACHINES["h100"], MACHINES["h200"]
_NOTHING = frozenset[str]()
_PRODUCTS = (
    *("dense_tflops", "head_tflops", "expert_tflops"),
    *("dense_fp8_tflops", "expert_fp8_tflops", "attention_tflops"),
)


def _faster(machine: Machine, name: str, times: float, **known: float) -> Machine:
    """A machine whose products are so many `times` as fast."""
    products = {rate: times * getattr(machine, rate) for rate in _PRODUCTS}
    return replace(machine, name=name, measured=_NOTHING, **(products | known))


KINDS: dict[str, Machine] = {
    # An H100 whose NVLink has 400 GB/s in place of 900. Inside a node it reaches 160 GB/s
    # (DeepSeek-V3, arXiv 2412.19437, section 3.2.2), or 153 to 158 GB/s with DeepEP.
    "h800": _faster(_H100, "H800 SXM", 1.0, node_gbs=155.0, node_line_gbs=200.0),
    # 148 of 989 TFLOP/s, of which the largest products reach 0.97; 4.0 TB/s.
    "h20": _faster(_H200, "H20", 0.8 * 148 / 650, memory_gib=95.6, memory_gbs=2500.0),
    "b200": _faster(
        _H200,
        "B200",
        2250 / 989,
        **{"memory_gib": 179.0, "memory_gbs": 5000.0, "node_gbs": 670.0, "node_line_gbs": 900.0},
    ),
    # Hosts of four GPUs in one NVLink domain of 72: what leaves a host is over NVLink too.
    "gb200": _faster(
        _H200,
        "GB200",
        2500 / 989,
        **{"memory_gib": 185.0, "memory_gbs": 5000.0, "node_gbs": 670.0, "node_line_gbs": 900.0},
        **{"network_gbs": 335.0, "network_line_gbs": 900.0, "node_gpus": 4},
    ),
    # For memory alone: our kernels do not run there, so that no rate of it is known.
    "a100": replace(_H100, name="A100", memory_gib=79.2, measured=_NOTHING, only_memory=True),
}
