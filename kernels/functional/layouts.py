"""Layouts in which others store the weights of experts, and the conversion to that of the kernels.

The kernels read w1 [E, 2F, D] as F gate rows and then F up rows, and w2 [E, D, F]. Another layout
is converted by a copy: in each pass of a call of the functions, or once by `keep_converted`. torch
copies to the other order of channels, with gate and up channels that alternate, at a sixth of the
speed of memory; tiles in Triton on NVIDIA GPUs have whole lines on both sides.

Legend: E experts, D hidden, F expert width, H = 2F for gated activations and F for others.
"""

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import is_parametrized

from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.functional.copies import resize_rows


def transposed(x: Tensor, *, interleaved: bool, back: bool) -> Tensor:
    """A contiguous copy of [E, D, H] as [E, H, D], or with `back` the inverse; differentiable once.

    `interleaved`: channels of [E, D, H] are gate 0, up 0, gate 1, ...; those of [E, H, D] are all
    gates, and then all ups.
    """
    out: Tensor = _Transposed.apply(x, interleaved, back)
    return out


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, interleaved: bool, back: bool) -> Tensor:
        ctx.interleaved, ctx.back = interleaved, back
        return _copy(x.contiguous(), interleaved, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _copy(grad.contiguous(), ctx.interleaved, not ctx.back), None, None


def _copy(x: Tensor, interleaved: bool, back: bool) -> Tensor:
    if x.is_cuda:
        from phalanx.kernels.elementwise.rows_triton import launch

        return launch(x, interleaved=interleaved, back=back)
    if not interleaved:
        return x.mT.contiguous()
    if back:
        return x.unflatten(1, (2, -1)).permute(0, 3, 2, 1).flatten(2)
    return x.mT.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous()


@dataclass(frozen=True)
class WeightLayout:
    """Order of the weights of experts in memory."""

    transposed: bool = False  # [E, in, out]: w1 [E, D, H] and w2 [E, F, D]
    interleaved: bool = False  # channels of w1 and b1: gate 0, up 0, gate 1, ...
    ffn: int = 0  # F, if the kernels read `padded` channels in place of F: zeros are behind them
    padded: int = 0

    def to_kernels(self, x: Tensor, *, fc1: bool) -> Tensor:
        """A weight [E, ., .] or bias [E, .] as the kernels read it; differentiable.

        It is contiguous, by at most one copy, and another if it is padded. `fc1`: w1 or b1, not w2
        or b2. ValueError for an odd number of channels, which cannot alternate.
        """
        shaped, interleaved = self.in_kernel_shape(x, fc1=fc1), self.interleaved and fc1
        if shaped is not x:
            x = transposed(x, interleaved=interleaved, back=False)
        elif interleaved:
            x = x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return self._resized(x.contiguous(), self.ffn, self.padded, fc1)

    def from_kernels(self, x: Tensor, *, fc1: bool) -> Tensor:
        """The inverse of `to_kernels`."""
        interleaved = self.interleaved and fc1
        x = self._resized(x.contiguous(), self.padded, self.ffn, fc1)
        if self.transposed and x.ndim == 3:
            return transposed(x, interleaved=interleaved, back=True)
        if interleaved:
            x = x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return x.contiguous()

    def _resized(self, x: Tensor, ffn: int, to: int, fc1: bool) -> Tensor:
        if not self.padded or (x.ndim == 2 and not fc1):
            return x
        rest = x.shape[2:].numel() if fc1 else 1
        shape = (len(x), -1, *x.shape[2:]) if fc1 else (*x.shape[:2], to)
        return resize_rows(x.view(-1, ffn * rest), to * rest).view(shape)

    def in_kernel_shape(self, x: Tensor, *, fc1: bool) -> Tensor:
        """A view in the shape that the kernels read, its channels in any order.

        ValueError for an odd number of channels, which cannot alternate.
        """
        x = x.mT if self.transposed and x.ndim == 3 else x
        if self.interleaved and fc1 and x.shape[1] % 2:
            raise ValueError(f"gate and up channels cannot alternate in {x.shape[1]}")
        return x


_FC1 = (True, False, True, False)  # of w1, w2, b1 and b2, those of the first layer


HALVES = WeightLayout()

LAYOUTS: dict[str, WeightLayout] = {
    "halves": HALVES,
    "interleaved": WeightLayout(interleaved=True),
    "transposed": WeightLayout(transposed=True),
    "transposed_interleaved": WeightLayout(transposed=True, interleaved=True),
}
"""Layouts by name: `halves` is the kernels', `transposed_interleaved` GPT-OSS's."""


@functools.cache
def layout_named(name: str) -> WeightLayout:
    """The layout of this name, of `padded_layout` too; ValueError for an unknown one."""
    name, _, sizes = name.partition(" ")
    if name not in LAYOUTS:
        raise ValueError(f"layout={name!r} is unknown: use one of {', '.join(LAYOUTS)}")
    ffn, padded = map(int, sizes.split() or (0, 0))
    return replace(LAYOUTS[name], ffn=ffn, padded=padded)


def padded_layout(layout: str, ffn: int, padded: int) -> str:
    """Name of a layout whose F channels the kernels read as `padded` ones."""
    return f"{layout} {ffn} {padded}"


def in_kernel_layout(weights: MLPWeights, layout: str) -> MLPWeights:
    """Weights in the kernels' layout, copied if need be; errors as `in_kernel_shapes`."""
    stored = layout_named(layout)
    in_kernel_shapes(weights, layout)
    w1, w2, b1, b2 = weights
    return MLPWeights(
        stored.to_kernels(w1, fc1=True),
        stored.to_kernels(w2, fc1=False),
        None if b1 is None else stored.to_kernels(b1, fc1=True),
        None if b2 is None else stored.to_kernels(b2, fc1=False),
    )


def in_kernel_shapes(weights: MLPWeights, layout: str) -> MLPWeights:
    """Views of weights in the shapes that they have for the kernels, without a copy.

    ValueError for an unknown layout, or one of gated weights for others.
    """
    stored = layout_named(layout)
    if stored == HALVES:
        return weights
    w1 = stored.in_kernel_shape(weights.w1, fc1=True)
    w2 = stored.in_kernel_shape(weights.w2, fc1=False)
    channels, ffn = w1.shape[1], w2.shape[2]
    if stored.interleaved and channels != 2 * ffn:
        raise ValueError(f"layout={layout}: w1 has {channels} channels, not 2 x {ffn}")
    return weights._replace(w1=w1, w2=w2)


@torch.no_grad()
def keep_converted(module: nn.Module, layout: str, names: Sequence[str | None]) -> None:
    """Convert a module's parameters to the kernels' layout, once; its state dicts keep theirs.

    New parameters, of another shape if `layout` is transposed, take the place of the old ones, with
    their attributes: create optimizers, and shard parameters, after the conversion. `state_dict`
    and `load_state_dict` keep the layout from before; what else is made from the parameters, as an
    optimizer's state or an adapter, has that of the kernels. A second call does nothing.

    >>> import torch
    >>> from phalanx.kernels.api import keep_converted
    >>> experts = torch.nn.Module()
    >>> experts.gate_up_proj = torch.nn.Parameter(torch.randn(4, 8, 2 * 16))
    >>> experts.down_proj = torch.nn.Parameter(torch.randn(4, 16, 8))
    >>> names = ["gate_up_proj", "down_proj", None, None]
    >>> keep_converted(experts, "transposed_interleaved", names)
    >>> experts.gate_up_proj.shape, experts.state_dict()["gate_up_proj"].shape
    (torch.Size([4, 32, 8]), torch.Size([4, 8, 32]))

    Args:
        module: owner of the parameters.
        layout: a key of `LAYOUTS`: the present layout.
        names: of the parameters w1, w2, b1 and b2; None: there is no such bias.

    Raises:
        ValueError: unknown layout, other than four names, or parameters that are sharded already,
            that have a parametrization, as an adapter's, or that an optimizer has.
    """
    stored = layout_named(layout)
    if len(names) != len(_FC1):
        raise ValueError("names are those of w1, w2, b1 and b2: give None for a missing bias")
    if stored == HALVES or getattr(module, _CONVERTED, False):
        return
    fc1 = {name: first for name, first in zip(names, _FC1, strict=True) if name}
    parameters = _free_parameters(module, list(fc1), layout)
    for name, parameter in parameters.items():
        # Not other data in it: autograd may have noted its shape.
        data = stored.to_kernels(parameter.data, fc1=fc1[name])
        converted = nn.Parameter(data, parameter.requires_grad)
        converted.__dict__.update(parameter.__dict__)
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, converted)

    # Not closures, so that the module can be pickled.
    module.register_state_dict_post_hook(partial(_convert, fc1, stored.from_kernels))
    module.register_load_state_dict_pre_hook(partial(_convert, fc1, stored.to_kernels))
    setattr(module, _CONVERTED, True)


def _free_parameters(module: nn.Module, names: list[str], layout: str) -> dict[str, nn.Parameter]:
    for name in names:
        owner, _, last = name.rpartition(".")
        if is_parametrized(module.get_submodule(owner), last):
            raise ValueError(
                f"layout={layout}: {name} has a parametrization or an adapter in this layout: "
                "convert without it"
            )
    parameters = {name: module.get_parameter(name) for name in names}
    if any(hasattr(p, "to_local") for p in parameters.values()):
        raise ValueError(f"layout={layout}: convert parameters before they are sharded")
    converted = {id(p) for p in parameters.values()}
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    groups = [group for o in optimizers for group in getattr(o, "param_groups", ())]
    if any(id(p) in converted for group in groups for p in group["params"]):
        raise ValueError(f"layout={layout}: convert parameters before an optimizer is created")
    return parameters


def _convert(
    fc1: dict[str, bool],
    to: Callable[..., Tensor],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *rest: Any,
) -> None:
    """Hook of a state dict: entries of these parameters in the other layout, in place."""
    for name, first in fc1.items():
        if (key := prefix + name) in state:
            state[key] = to(state[key].detach(), fc1=first)


_CONVERTED = "_phalanx_converted"
