"""Layers of the exchange benchmark, and their targets on H200s of one host.

A target becomes a ratio, target time over ours: 1 or more is met. Targets hold for a whole layer on
several GPUs, at these numbers of tokens.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.scripts.lab.bench.problems import SWIGLU
from phalanx.scripts.lab.bench.shapes import Shape

GPUS = 8  # GPUs of a host; the targets below are for this number
TOKENS = 8192  # tokens of a rank; the targets below are for this number
_NOTHING: Mapping[str, float] = MappingProxyType({})


class Model(NamedTuple):
    """An MoE layer without its router."""

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    activation: Activation = SWIGLU
    biases: bool = False
    targets: Mapping[str, float] = _NOTHING  # TFLOP/s of a GPU, by pass
    shared: int = 0  # FFN width of the shared expert; 0: none
    exposed: bool = False  # also measure the share of its exchanges that is not overlapped

    def shape(self, tokens: int) -> Shape:
        """T, D, F, E, K."""
        return tokens, *self[1:5]

    def flops(self, tokens: int, pass_name: str) -> int:
        """FLOP of a rank's share of the experts in pass `forward` or `backward`."""
        matrices = 3 if self.activation.gated else 2
        passes = {"forward": 1, "backward": 2}[pass_name]
        return 2 * matrices * passes * tokens * self.hidden * (self.top_k * self.ffn + self.shared)


QWEN3 = Model("Qwen3-30B-A3B", 2048, 768, 128, 8, targets={"forward": 350, "backward": 300})
DEEPSEEK = Model(
    "DeepSeek-V3",
    7168,
    2048,
    256,
    8,
    targets={"forward": 540, "backward": 560},
    shared=2048,
    exposed=True,
)
GPT_OSS = Model(
    "GPT-OSS-120B",
    2880,
    2880,
    128,
    4,
    activation=Activation("quick_geglu", limit=7.0, offset=1.0),
    biases=True,
    targets={"forward": 520},
)
FLASH = Model("FlashDMoE", 2048, 2048, 32, 2, activation=Activation("squared_relu"))
"""arXiv 2506.04667, figure of latency against tokens; their activation is as cheap."""
TINY = Model("tiny", 64, 64, 8, 2, shared=64, exposed=True)
TINY_BIASED = TINY._replace(name="tiny, biases", ffn=128, biases=True, shared=0, exposed=False)
TINY_FLASH = FLASH._replace(name="tiny, ungated", hidden=128, ffn=64, experts=8)

FLASH_TOKENS = {4096: 0.6, 8192: 0.95, 16384: 1.7}
"""Tokens of a rank and the target milliseconds of the forward pass."""
WIRE_SMS = (8, 16, 24, 32, 0)  # SMs that push; 0: all
WIRE_TARGETS = {"16 SMs": 330, "16 SMs, beside a GEMM": 300}
"""Target GB/s leaving a GPU, with DeepSeek-V3's tokens."""
PLAN_TARGET = 0.040  # milliseconds
PLAN_RANKS = 8
EXPOSED_TARGET = 0.4
BETWEEN_TOKENS = 4096  # tokens of a rank of suite `between`; its targets are for this number
BETWEEN_TARGETS = (0.6, 0.45)
"""Target and goal of the exposed part of the exchanges between nodes, over both passes."""
SCALING_TARGET = 0.90  # target of the time on two ranks over that on all
SKEW_TARGET = 1 / 1.15  # target of the experts' time over the layer's, all tokens on one rank
REPLICATION_TARGETS = {
    "balanced": (1 / 1.01, 1.0),
    "Zipf": (1 / 1.12, 1 / 1.05),
    "half to one expert": (1 / 1.35, 1 / 1.15),
    "one rank": (1 / 1.5, 1 / 1.2),
}
"""Target and goal of balanced time without replication over uneven time with it."""
ROWS_TARGETS = (1.7, 1.9)  # target and goal of a dispatch's time in bf16 over that in FP8
PACK_WIRE = 50e9  # bytes a second of the network that packing is compared with
PACK_TARGETS = (0.05, 0.03)
"""Target and goal of the time to pack and unpack rows over that of both exchanges."""

Case = tuple[Model, int]  # a layer and the tokens of a rank


def cases(suite: str, tokens: int | None, *, tiny: bool) -> list[Case]:
    """Layers of a suite, and their tokens unless given; `tiny` sizes are for a CPU."""
    if tiny:
        layers = {"layer": (TINY, TINY_BIASED), "flash": (TINY_FLASH,), "scaling": (TINY_FLASH,)}
        return [(model, tokens or 32) for model in layers.get(suite, (TINY,))]
    if suite == "between":
        return [(DEEPSEEK, tokens or BETWEEN_TOKENS)]
    if suite == "flash":
        return [(FLASH, t) for t in ([tokens] if tokens else FLASH_TOKENS)]
    models = (DEEPSEEK, QWEN3, GPT_OSS)
    layers = {"plan": (DEEPSEEK,), "scaling": (FLASH, *models), "skew": (DEEPSEEK,)}
    layers |= {"replication": (QWEN3, DEEPSEEK), "rows": (DEEPSEEK, QWEN3)}
    return [(m, tokens or TOKENS) for m in layers.get(suite, models)]
