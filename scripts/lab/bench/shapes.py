"""Shapes of each suite, and the ratios that must be reached (bar) and should be (goal).

A ratio is the time of the fastest peer, or of the undisturbed case, over ours: above 1 is faster.
"""

from typing import NamedTuple

Shape = tuple[int, ...]


class Bars(NamedTuple):
    """Bars that must be reached, and goals, each forward and backward."""

    must: tuple[float, float]
    goal: tuple[float | None, float | None]

    def of(self, pass_name: str) -> tuple[float, float | None]:
        position = ("forward", "backward").index(pass_name)
        return self.must[position], self.goal[position]


MLP: dict[Shape, Bars] = {
    (65536, 7168, 2048, 32): Bars((1.08, 1.08), (1.15, 1.15)),
    (32768, 2880, 2880, 4): Bars((1.15, 1.25), (1.3, 1.5)),
    (32768, 2880, 2880, 32): Bars((1.20, 1.30), (1.3, 1.6)),
    (65536, 2048, 768, 16): Bars((1.20, 1.25), (1.3, 1.6)),
}
"""Expert rows, hidden, expert width, experts: against the fastest unfused MLP."""
LAYER: dict[Shape, Bars] = {
    (24576, 1536, 256, 128, 8): Bars((1.05, 1.05), (1.20, 1.15)),
    (32768, 4096, 256, 256, 16): Bars((1.03, 1.03), (1.12, 1.10)),
    (32768, 2048, 768, 128, 8): Bars((1.04, 1.04), (1.12, 1.10)),
    (32768, 2048, 512, 512, 10): Bars((1.10, 1.06), (1.22, 1.15)),
    (32768, 4096, 2048, 64, 4): Bars((0.98, 0.98), (1.03, 1.03)),
}
"""Tokens, hidden, expert width, experts, experts per token: against SonicMoE."""
FP8: dict[Shape, Bars] = {
    tuple(MLP)[0]: Bars((1.45, 1.35), (1.65, 1.60)),
    tuple(MLP)[1]: Bars((1.33, 1.30), (1.55, 1.55)),
    tuple(MLP)[3]: Bars((1.15, 1.10), (1.35, 1.30)),
}
"""The expert MLP in FP8 against bf16 in the same rounds."""
CROSSOVER: tuple[Shape, ...] = (
    (65536, 1024, 256, 32),
    (65536, 1024, 512, 32),
    (65536, 1024, 1024, 32),
    (65536, 2048, 512, 32),
    (65536, 2048, 1408, 32),
)
"""Shapes without bars, small experts among them, that show where FP8 begins to pay."""
FP8_TE = dict(zip(MLP, ((1.30, 1.45), (1.50, 1.70), (2.0, 2.3), (2.5, 2.9)), strict=True))
"""Bar and goal of both passes of the FP8 MLP against Transformer Engine's."""
FP8_GEMMS = {
    shape: dict.fromkeys(("rows of fc2", "rows of the gradient of fc1"), rows)
    | dict.fromkeys(("wgrad of w1", "wgrad of w2"), wgrad)
    for shape, rows, wgrad in (
        (tuple(MLP)[0], (1.48, 1.70), (1.35, 1.60)),
        (tuple(MLP)[1], (1.38, 1.60), (1.35, 1.55)),
        (tuple(MLP)[3], (1.25, 1.40), (1.20, 1.40)),
    )
}
"""Bar and goal of the FP8 MLP's GEMMs; weight gradients in `square` blocks."""
WGRAD_PAIRS: dict[Shape, tuple[float, float | None]] = {
    (8192, 2880, 2880, 16): (1.25, 1.5),
    (8192, 2048, 768, 64): (1.25, 1.5),
}
"""Rows of a micro-batch, hidden, expert width, experts: one pass over two micro-batches against two
passes."""
MARGINS = (0, 8, 16, 24, 32)
ZIPF = 0.6
SKEW_BAR = 0.95
GATHER_BAR = 0.93
_FREE, _OCCUPIED = 0.97, 0.93


def margin_bar(margin: int, sms: int) -> float:
    """Share of the full rate that must remain if `margin` SMs are left free."""
    return _FREE * (sms - margin) / sms


def occupied_bars(margin: int, sms: int) -> tuple[float, float]:
    """Bar and goal of the same while other kernels occupy those SMs."""
    return _OCCUPIED * margin_bar(margin, sms), _OCCUPIED * (sms - margin) / sms


SUITES: dict[str, tuple[Shape, ...]] = {
    "mlp": tuple(MLP),
    "layer": tuple(LAYER),
    "margins": (tuple(MLP)[0], tuple(MLP)[3]),
    "skew": tuple(MLP),
    "gather": (*MLP, *LAYER),
    "host": ((256, 256, 128, 8, 2),),
    "fp8": (*MLP, *CROSSOVER),
    "fp8_gemms": tuple(MLP),
    "wgrad_pairs": (*WGRAD_PAIRS, (32768, 2880, 2880, 16)),
}
SIZES = {
    **dict.fromkeys(("mlp", "margins", "skew", "fp8", "fp8_gemms", "wgrad_pairs"), (4,)),
    **dict.fromkeys(("layer", "host"), (5,)),
    "gather": (4, 5),
}  # sizes in a shape of each suite


def parse(text: str) -> Shape:
    """`65536,7168,2048,32` and the like; ValueError otherwise."""
    shape = tuple(int(size) for size in text.split(","))
    if not 1 <= len(shape) <= 5 or min(shape) < 1:
        raise ValueError(f"{text}: a shape is up to 5 positive numbers")
    return shape


def select(suite: str, wanted: list[Shape]) -> tuple[Shape, ...]:
    """Shapes of a suite that start with one of `wanted`, and complete ones not listed."""
    listed = SUITES[suite]
    if not wanted:
        return listed
    listed_matches = [s for s in listed if any(s[: len(w)] == w for w in wanted)]
    new = [w for w in wanted if len(w) in SIZES[suite] and w not in listed]
    return (*listed_matches, *new)
