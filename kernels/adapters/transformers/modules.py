"""Modules of experts of transformers: which they are, their kind, and the check of it.

A class may bring its own gate, as code. It is evaluated on a grid that reaches beyond every
constant of the module, and so are the activations of the kernels with these constants, through the
public function. Only one that agrees is taken; names play no part.

Legend: G points of the grid, which are both tokens and channels.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.kernels.api import ACTIVATIONS, Activation, grouped_experts
from phalanx.kernels.tracing import outside_graphs

_POINTS = (-20.0, -6.0, -3.0, -1.7, -1.0, -0.4, 0.0, 0.3, 1.0, 2.0, 3.5, 8.0, 25.0)
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")  # attributes with the constants of gates


def activation_of(experts: Any) -> Activation:
    """The activation that a module of experts computes; ValueError if the kernels have none."""
    limits, alphas = _constants(experts, _LIMITS), _constants(experts, _ALPHAS)
    grid = torch.tensor(
        sorted({*_POINTS, *(s * v for v in limits for s in (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0))}),
        dtype=torch.float64,
        device="cpu",
    )
    if _is_stateless(experts):
        h_GH = _channels(grid, gated=experts.has_gate)
        want_GG = _of_module(experts, h_GH)
        for candidate in _candidates(limits, alphas, gated=experts.has_gate):
            if torch.allclose(_of_kernels(candidate, h_GH), want_GG, rtol=1e-5, atol=1e-5):
                return candidate
    raise ValueError(
        f"{type(experts).__name__}: phalanx does not know the activation of these experts: use "
        "experts_implementation='grouped_mm'"
    )


def _constants(experts: Any, names: tuple[str, ...]) -> list[float]:
    values = (getattr(experts, name, None) for name in names)
    return sorted({float(v) for v in values if isinstance(v, int | float)})


def _is_stateless(experts: Any) -> bool:
    """True if the activation has no parameters, which would have to be trained."""
    function = getattr(experts, "act_fn", None)
    return not (isinstance(function, nn.Module) and any(True for _ in function.parameters()))


def _channels(grid: Tensor, *, gated: bool) -> Tensor:
    G = len(grid)
    gate_GG = grid.expand(G, G)
    return torch.cat((gate_GG, gate_GG.T), -1) if gated else gate_GG


@torch.no_grad()
def _of_module(experts: Any, h_GH: Tensor) -> Tensor:
    if not experts.has_gate:
        values: Tensor = experts.act_fn(h_GH)
    elif experts.is_concatenated:
        values = experts._apply_gate(h_GH)
    else:
        values = experts._apply_gate(h_GH.unflatten(-1, (2, -1)).mT.flatten(-2))
    return values


@torch.no_grad()
def _of_kernels(activation: Activation, h_GH: Tensor) -> Tensor:
    """[G, G] activated values: one expert whose two layers are identities."""
    G, H = h_GH.shape
    w1 = torch.eye(H, dtype=h_GH.dtype, device=h_GH.device)
    first = h_GH.new_zeros(G, 1, dtype=torch.int32)
    prob = h_GH.new_ones(G, 1, dtype=torch.float32)
    out = grouped_experts(
        h_GH, first, prob, w1[None], w1[None, :, :G], activation=activation, backend="reference"
    )
    return out[:, :G]


def _candidates(limits: list[float], alphas: list[float], *, gated: bool) -> Iterator[Activation]:
    kinds = [kind for kind, facts in ACTIVATIONS.items() if facts.gated == gated]
    for kind, limit, alpha, offset in itertools.product(
        kinds, [0.0, *limits], alphas or [Activation.alpha], (0.0, 1.0) if gated else (0.0,)
    ):
        yield Activation(kind, alpha=alpha, limit=limit, offset=offset)


NAME = "phalanx"  # value of `experts_implementation`
FACTS = f"_{__name__.partition('.')[0]}"
"""Attribute of a module with what is known of it: another copy of this package has another one."""


def prepare(model: nn.Module) -> None:
    """Check the experts of a model that have this implementation; parameters stay as they are.

    transformers' models are checked when loaded or made from a config, others in their first
    forward pass. ValueError for experts of a kind that the kernels do not compute.
    """
    for experts in experts_of(model):
        facts_of(experts)


def experts_of(model: nn.Module) -> list[Any]:
    """The modules of experts of a model that have this implementation."""
    dispatched: list[Any] = [module for module in model.modules() if is_dispatched(module)]
    return [m for m in dispatched if m.config._experts_implementation == NAME]


def is_dispatched(module: Any) -> bool:
    """True for experts of a class with transformers' decorator, of any implementation."""
    return "is_transposed" in vars(module)


def facts_of(experts: Any) -> tuple[Activation, str]:
    """Activation and present layout; ValueError for experts that the kernels do not compute."""
    facts: tuple[Activation, str] | None = experts.__dict__.get(FACTS)
    return _recognised(experts) if facts is None else facts


@outside_graphs
def _recognised(experts: Any) -> tuple[Activation, str]:
    if experts.has_post_expert_norm:
        raise ValueError(
            f"{type(experts).__name__}: phalanx does not compute a norm behind each expert: use "
            "experts_implementation='grouped_mm'"
        )
    if experts.down_proj.dtype.itemsize < 2:
        raise ValueError(
            f"{type(experts).__name__}: phalanx does not read quantized weights: load the model "
            "in bf16"
        )
    facts = activation_of(experts), _layout(experts)
    setattr(experts, FACTS, facts)
    return facts


def _layout(experts: Any) -> str:
    interleaved = experts.has_gate and not experts.is_concatenated
    words = ["transposed"] * experts.is_transposed + ["interleaved"] * interleaved
    return "_".join(words) or "halves"


def names_of(experts: Any) -> tuple[str, str, str | None, str | None]:
    """The parameters that are w1, w2, b1 and b2."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    if not experts.has_bias:
        return first, "down_proj", None, None
    return first, "down_proj", f"{first}_bias", "down_proj_bias"
