"""The activation between the two linear layers of an expert, as a value.

It says what is computed; each backend says how. `kernels.expert_mlp.reference.activation` states it
in plain torch. Gated kinds read H = 2F channels, the gate in the first F and the linear half in the
last F. The kinds are the entries of `configs.tables.activations`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

from torch import Tensor

from phalanx.configs.tables.activations import ACTIVATIONS, ActivationFacts


@dataclass(frozen=True)
class Activation:
    """An entry of `configs.tables.activations`, which has its formula, with its constants.

    Raises:
        ValueError: unknown kind, negative limit, or constants that are no numbers.
    """

    kind: str
    alpha: float = 1.702  # slope inside the sigmoid of `quick_geglu`
    limit: float = 0.0
    """Above 0, clamps the gate (or all of h) to <= limit, the linear half to [-limit, limit]."""
    offset: float = 0.0  # added to the linear half after the clamp (1 for GPT-OSS)

    def __post_init__(self) -> None:
        if self.kind not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation {self.kind!r}: use one of {', '.join(ACTIVATIONS)}"
            )
        for name in ("alpha", "limit", "offset"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name} must be a number, not {getattr(self, name)!r}")
        if not self.limit >= 0:
            raise ValueError(
                f"an activation cannot be clamped to limit={self.limit}: use a positive number, or "
                "0 for no clamp"
            )

    @property
    def facts(self) -> ActivationFacts:
        """Its entry in the table."""
        return ACTIVATIONS[self.kind]

    @property
    def gated(self) -> bool:
        """True if a linear (up) part multiplies the activated one."""
        return self.facts.gated

    def width(self, ffn: int) -> int:
        """H, the rows of W1 and b1 of an expert of width `ffn`."""
        return self.facts.halves * ffn


class Formula(NamedTuple):
    """Functions of an activation in plain torch: `configs.tables.activations.ActivationFacts`."""

    value: Callable[[Tensor, Activation], Tensor]
    slope: Callable[[Tensor, Activation], Tensor]


def formula(act: Activation) -> Formula:
    """The functions of an activation's entry."""
    return Formula(function(act.facts.value), function(act.facts.slope))


@cache
def function(path: str) -> Callable[..., Any]:
    """Import a function that the table names `module:function`."""
    resolved: Callable[..., Any] = resolve_name(path)
    return resolved
