"""Layers of the exchange benchmark, and what is asked of them on H200s of one host.

What is asked becomes a ratio, the asked time over ours: 1 or more is met. It holds for the whole
layer, on several GPUs, at the tokens it is asked for.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.scripts.bench.problems import SWIGLU
from phalanx.scripts.bench.shapes import Shape

GPUS = 8
"""Of a host, which what is asked below is asked of."""
TOKENS = 8192
"""Of a rank; what is asked below is asked at this number."""
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
    asked: Mapping[str, float] = _NOTHING
    """TFLOP/s of a GPU, by pass."""
    shared: int = 0
    """F of an expert that takes all tokens, if there is one."""
    exposed: bool = False
    """Also measure which share of its exchanges a layer has to wait for."""

    def shape(self, tokens: int) -> Shape:
        """T, D, F, E, K."""
        return tokens, *self[1:5]

    def flops(self, tokens: int, what: str) -> int:
        """Of a rank's share of the experts, in `forward` or `backward`."""
        matrices = 3 if self.activation.gated else 2
        passes = {"forward": 1, "backward": 2}[what]
        return 2 * matrices * passes * tokens * self.hidden * (self.top_k * self.ffn + self.shared)


QWEN3 = Model("Qwen3-30B-A3B", 2048, 768, 128, 8, asked={"forward": 350, "backward": 300})
DEEPSEEK = Model(
    "DeepSeek-V3",
    7168,
    2048,
    256,
    8,
    asked={"forward": 540, "backward": 560},
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
    asked={"forward": 520},
)
FLASH = Model("FlashDMoE", 2048, 2048, 32, 2, activation=Activation("squared_relu"))
"""arXiv 2506.04667, figure of latency against tokens; their activation costs as little."""
TINY = Model("tiny", 64, 64, 8, 2, shared=64, exposed=True)
TINY_BIASED = TINY._replace(name="tiny, biases", ffn=128, biases=True, shared=0, exposed=False)
TINY_FLASH = FLASH._replace(name="tiny, ungated", hidden=128, ffn=64, experts=8)

FLASH_TOKENS = {4096: 0.6, 8192: 0.95, 16384: 1.7}
"""Tokens of a rank and the milliseconds that are asked of the forward pass."""
WIRE_SMS = (8, 16, 24, 32, 0)
"""SMs that push; 0 takes all."""
WIRE_ASKED = {"16 SMs": 330, "16 SMs, beside a GEMM": 300}
"""GB/s that leave a GPU, of DeepSeek-V3's tokens."""
PLAN_ASKED = 0.040
"""Milliseconds."""
PLAN_RANKS = 8
EXPOSED_ASKED = 0.4
SCALING_ASKED = 0.90
"""Time on two ranks over that on all."""
SKEW_ASKED = 1 / 1.15
"""Time of the experts alone over that of the layer, all tokens on one rank."""
CLONES_ASKED = {
    "balanced": (1 / 1.01, 1.0),
    "Zipf": (1 / 1.12, 1 / 1.05),
    "half to one expert": (1 / 1.35, 1 / 1.15),
    "one rank": (1 / 1.5, 1 / 1.2),
}
"""Time of balanced routing without clones over that of a routing with them: asked, and the goal."""
ROWS_ASKED = (1.7, 1.9)
"""Time of a dispatch in bf16 over that in FP8: asked, and the goal."""

Case = tuple[Model, int]
"""A layer and the tokens of a rank."""


def cases(suite: str, tokens: int | None, *, tiny: bool) -> list[Case]:
    """What a suite measures.

    Args:
        tokens: of a rank, if not those of the suite.
        tiny: sizes of a CPU.
    """
    if tiny:
        layers = {"layer": (TINY, TINY_BIASED), "flash": (TINY_FLASH,), "scaling": (TINY_FLASH,)}
        return [(model, tokens or 32) for model in layers.get(suite, (TINY,))]
    if suite == "flash":
        return [(FLASH, t) for t in ([tokens] if tokens else FLASH_TOKENS)]
    models = (DEEPSEEK, QWEN3, GPT_OSS)
    layers = {"plan": (DEEPSEEK,), "scaling": (FLASH, *models), "skew": (DEEPSEEK,)}
    layers |= {"clones": (QWEN3, DEEPSEEK), "rows": (DEEPSEEK, QWEN3)}
    return [(m, tokens or TOKENS) for m in layers.get(suite, models)]
