"""The activation between the two linear layers of an expert, as a value.

It says what is computed; each backend says how. `kernels.expert_mlp.reference.activation` is the
definition in plain torch. Gated kinds read H = 2F channels, the gate in the first F and the linear
half in the last F.
"""

from dataclasses import dataclass
from pathlib import Path

GATED = ("swiglu", "geglu", "quick_geglu")
KINDS = (*GATED, "squared_relu")


@dataclass(frozen=True)
class Activation:
    """One of KINDS with its constants.

    - `swiglu`: gate * sigmoid(gate) * up (arXiv 2002.05202)
    - `geglu`: gate * Phi(gate) * up with the exact normal distribution function (arXiv 2002.05202)
    - `quick_geglu`: gate * sigmoid(alpha * gate) * up (GPT-OSS, arXiv 2508.10925)
    - `squared_relu`: max(h, 0)^2, not gated (arXiv 2109.08668)

    Raises:
        ValueError: unknown kind or negative limit.
    """

    kind: str
    alpha: float = 1.702
    """Slope inside the sigmoid of `quick_geglu`."""
    limit: float = 0.0
    """Above 0, clamps the gate (or all of h) to <= limit, the linear half to [-limit, limit]."""
    offset: float = 0.0
    """Added to the linear half after the clamp (1 for GPT-OSS)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"unknown activation {self.kind!r}: set model.moe.activation to one of "
                f"{', '.join(KINDS)}"
            )
        if not self.limit >= 0:
            raise ValueError(
                f"an activation cannot be clamped to {self.limit}: set model.moe.activation_limit "
                "to a positive number, or to 0 for no clamp"
            )

    @property
    def gated(self) -> bool:
        """Whether a linear half multiplies the activated one."""
        return self.kind in GATED

    def width(self, ffn: int) -> int:
        """H, the rows of W1 and b1 of an expert of width `ffn`."""
        return 2 * ffn if self.gated else ffn


def unknown(kind: str, file: str) -> ValueError:
    """What a backend raises that has no formula for a kind.

    Args:
        kind: of KINDS.
        file: where the formula belongs, as `__file__`.
    """
    here = "/".join(Path(file).parts[-3:])
    return ValueError(f"{here} has no formula for activation {kind!r}: add it there")
