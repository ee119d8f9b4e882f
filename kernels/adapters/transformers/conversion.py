"""Experts whose weights are converted to the layout of the kernels, on request.

GPT-OSS's weights are transposed and interleaved, and are copied in each pass. Converted they are
read as they are, but then what is made from parameters has the layout of the kernels: adapters are
refused, and an optimizer's state is not that of transformers' own experts.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from phalanx.adapters.transformers.modules import NAME, experts_of, facts_of, names_of
from phalanx.kernels.api import keep_converted

_ADVICE = "use the model without phalanx.adapters.transformers.convert"


class Converted:
    """In place of a module's `is_transposed`, which adapters and other implementations ask for."""

    def __bool__(self) -> bool:
        raise ValueError(
            f"the weights of these experts are in the layout of experts_implementation={NAME!r}, "
            f"which adapters and other implementations do not know: {_ADVICE}"
        )


def convert(model: nn.Module) -> int:
    """Convert experts' weights in another layout to that of the kernels, once.

    State dicts and saved models keep the layout of transformers. Parameters, their gradients and an
    optimizer's state do not: call it before an optimizer is created, and load states of optimizers
    of converted models alone.

    Args:
        model: a model, of which modules of experts with this implementation are converted.

    Returns:
        Number of modules that are converted.

    Raises:
        ValueError: experts of a kind that the kernels do not compute, or parameters that are
            sharded already, or that an adapter or an optimizer has.
    """
    others = [experts for experts in experts_of(model) if facts_of(experts)[1] != "halves"]
    adapted = {id(getattr(module, "base_layer", None)) for module in model.modules()}
    for experts in others:
        if id(experts) in adapted:
            raise ValueError(f"{type(experts).__name__}: these experts have an adapter: {_ADVICE}")
    for experts in others:
        activation, layout = facts_of(experts)
        keep_converted(experts, layout, names_of(experts))
        experts.is_transposed = Converted()
        experts._apply_gate = _refuse  # transformers' eager experts call it
        experts._phalanx = activation, "halves"
    return len(others)


def check_unadapted(experts: Any) -> None:
    """Raise ValueError for converted experts of which a parameter has a parametrization."""
    if isinstance(experts.is_transposed, Converted) and is_parametrized(experts):
        raise ValueError(f"{type(experts).__name__}: converted experts have an adapter: {_ADVICE}")


def _refuse(gate_up: Tensor) -> Tensor:
    raise ValueError(f"the weights of these experts are in the layout of {NAME!r}: {_ADVICE}")
