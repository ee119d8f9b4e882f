"""The activation between the two linear layers of an expert: as a value, and in plain torch.

The value says what is computed; each backend says how. `kernels.expert_mlp.reference.activation` is
the definition. Gated kinds read H = 2F channels, the gate in the first F and the linear half in the
last F. The kinds are the entries of `configs.tables.activations`.

Values and slopes are functions of the clamped gate (or of h without a gate), elementwise, in the
dtype of x. `kernels.expert_mlp.torch_grouped` compiles them; `kernels.expert_mlp.reference` and
dense MLPs compute them where torch has no function of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.configs.tables.activations import ACTIVATIONS, ActivationFacts

if TYPE_CHECKING:  # JAX's experts use this file without torch
    from torch import Tensor

_GATED = {"silu": "swiglu", "gelu": "geglu"}


def gated_hint(name: str) -> str:
    """End of an error's line: what a name of torch is called here, where experts have a gate."""
    kind = _GATED.get(name.lower())
    return "" if kind is None else f"; {name} with a gate is {kind}"


@dataclass(frozen=True)
class Activation:
    """An entry of `configs.tables.activations`, which has its formula, with its constants.

    Raises ValueError for an unknown kind, a negative limit, or constants that are no numbers.
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
                f"{gated_hint(str(self.kind))}"
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

    value: "Callable[[Tensor, Activation], Tensor]"
    slope: "Callable[[Tensor, Activation], Tensor]"


def formula(act: Activation) -> Formula:
    """The functions of an activation's entry."""
    return Formula(function(act.facts.value), function(act.facts.slope))


@cache
def function(path: str) -> Callable[..., Any]:
    """Import a function that the table names `module:function`."""
    resolved: Callable[..., Any] = resolve_name(path)
    return resolved


def silu(x: "Tensor", act: Activation) -> "Tensor":
    """x * sigmoid(x)."""
    return _sigmoid_linear(x, 1.0)


def silu_slope(x: "Tensor", act: Activation) -> "Tensor":
    """Derivative of `silu`."""
    return _sigmoid_linear_slope(x, 1.0)


def quick_gelu(x: "Tensor", act: Activation) -> "Tensor":
    """x * sigmoid(alpha * x)."""
    return _sigmoid_linear(x, act.alpha)


def quick_gelu_slope(x: "Tensor", act: Activation) -> "Tensor":
    """Derivative of `quick_gelu`."""
    return _sigmoid_linear_slope(x, act.alpha)


def gelu(x: "Tensor", act: Activation) -> "Tensor":
    """x times the normal distribution function of x."""
    return x * _normal_cdf(x)


def gelu_slope(x: "Tensor", act: Activation) -> "Tensor":
    """Derivative of `gelu`."""
    density = (-0.5 * x.square()).exp() * math.sqrt(0.5 / math.pi)
    return _normal_cdf(x) + x * density


def squared_relu(x: "Tensor", act: Activation) -> "Tensor":
    """The square of max(x, 0)."""
    return x.relu().square()


def squared_relu_slope(x: "Tensor", act: Activation) -> "Tensor":
    """Derivative of `squared_relu`."""
    return 2 * x.relu()


def _sigmoid_linear(x: "Tensor", alpha: float) -> "Tensor":
    return x * (alpha * x).sigmoid()


def _sigmoid_linear_slope(x: "Tensor", alpha: float) -> "Tensor":
    s = (alpha * x).sigmoid()
    return s + alpha * x * s * (1 - s)


def _normal_cdf(x: "Tensor") -> "Tensor":
    return 0.5 * (1 + (x * math.sqrt(0.5)).erf())
