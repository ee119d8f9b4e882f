"""Specification of an expert MLP, a shared expert or a dense MLP, as one value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from phalanx.configs.tables.backends import ExpertBackend, expert_backend
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.quantize.recipe import Recipe

type Pass = Literal["forward", "dgrad", "wgrad"]  # which runs the kernels of a margin


@dataclass(frozen=True)
class Margins:
    """SMs that the kernels of each pass leave free for others, such as communication.

    Only `fused` and `cudnn` can; a margin changes no result. With `cudnn` each value is compiled
    in, and weight gradients leave none free.
    """

    forward: int = 0
    dgrad: int = 0  # data gradients: all kernels of the backward pass that lead to dx and dprob
    wgrad: int = 0  # weight and bias gradients

    def __post_init__(self) -> None:
        for name in ("forward", "dgrad", "wgrad"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(
                    f"{getattr(self, name)} SMs cannot be left free: set "
                    f"kernels.sm_margin.{name} to 0 or more"
                )

    def at_least(self, sms: int) -> "Margins":
        return Margins(*(max(sms, n) for n in (self.forward, self.dgrad, self.wgrad)))

    def options(self, step: Pass) -> LaunchOptions:
        return LaunchOptions(getattr(self, step))


class Run(NamedTuple):
    """Channels that are contiguous in both orders."""

    stored: int  # first channel of the run in memory
    canonical: int  # the same channel in [gate; up]


class ChannelOrder(Protocol):
    """Order of the H = 2F channels of a gated fc1 other than [gate; up]; hashable, equal by order.

    Parameters in it, with their gradients and optimizer states, are converted to [gate; up] where
    they leave the kernels, as in checkpoints.
    """

    @property
    def run(self) -> int:
        """Channels of a run, of gates or of ups."""
        ...

    def store(self, canonical: Tensor, dim: int) -> Tensor:
        """A contiguous copy in this order, of H channels along a dimension."""
        ...

    def canonical(self, stored: Tensor, dim: int) -> Tensor: ...

    def runs(self, channels: int) -> Iterator[Run]: ...

    def __hash__(self) -> int: ...


def channel_order(backend: str, activation: Activation) -> ChannelOrder | None:
    """The order that a backend has of its own for weights with an activation; None: [gate; up]."""
    path = expert_backend(backend).channel_order
    if not path or not activation.gated:
        return None
    order: ChannelOrder = resolve_name(path)()
    return order


@dataclass(frozen=True)
class MLPSpec:
    """Activation, backend and options of an MLP."""

    activation: Activation
    backend: str  # `reference`, `torch`, `fused` or `cudnn`; see `kernels.registry`
    margins: Margins = Margins()
    accumulate: bool = False
    """Add gradients of parameters with a `main_grad` of their shape, fp32 or of their dtype, to
    that, and set `grad_added_to_main_grad`, as Megatron-Core's data parallel wrapper expects."""
    recipe: Recipe | None = None  # quantization of the GEMMs' operands; None: no quantization
    save_unquantized: bool = False
    """With a recipe, dense layers save their inputs unquantized and quantize them again in the
    backward pass, for callers that free these inputs."""
    recompute_h: bool = False  # experts save no h: the backward pass recomputes fc1
    keep_fp8: bool = False  # FP8 copies of weights are kept until the weights change (fused only)
    channel_order: ChannelOrder | None = None  # in memory; None: [gate; up]

    @property
    def facts(self) -> ExpertBackend:
        return expert_backend(self.backend)


def for_widths(spec: MLPSpec, *widths: int) -> MLPSpec:
    """The spec of a dense layer with these numbers of channels.

    It has `torch` if the fused kernels do not support one, as of a projection on tensor-parallel
    ranks.
    """
    multiple = spec.facts.dense_multiple
    if not multiple or all(width % multiple == 0 for width in widths):
        return spec
    return replace(spec, backend="torch", margins=Margins(), keep_fp8=False)


class MLPWeights(NamedTuple):
    """Parameters of an MLP, stacked over L experts."""

    w1: Tensor  # [L, H, D]; if gated, F gate rows and then F up rows
    w2: Tensor  # [L, D, F]
    b1: Tensor | None = None  # [L, H]
    b2: Tensor | None = None  # [L, D]


type Layer = Literal["fc1", "fc2"]
LAYERS: tuple[Layer, Layer] = ("fc1", "fc2")


def layer_pair[T](values: Sequence[T], layer: Layer) -> tuple[T, T]:
    """The entries of a layer's weight and bias among values of w1, w2, b1 and b2."""
    index = LAYERS.index(layer)
    return values[index], values[index + 2]
