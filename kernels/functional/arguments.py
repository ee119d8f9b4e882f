"""Checks of what callers give to the public functions: one line that names the argument.

Legend: T tokens, K experts per token, E experts, D hidden, F expert width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.availability import short
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of activations, weights, logits and probabilities, in all functions and modules."""
_NAMES = ("w1", "w2", "b1", "b2")


def check_tensor(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a dense tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(value).__name__}")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, not {value.layout}")


def check_floats(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a tensor of one of `FLOATS`."""
    check_tensor(name, value)
    check_float(name, value.dtype)


def check_width(name: str, value: Tensor) -> None:
    """Raise ValueError for a tensor without a last axis, or with nothing in it."""
    if not value.ndim or not value.shape[-1]:
        raise ValueError(f"{name} must have channels in its last axis, not {list(value.shape)}")


def check_float(name: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError for a dtype that is none of `FLOATS`."""
    if dtype not in FLOATS:
        *most, last = map(short, FLOATS)
        found = dtype if dtype is None else short(dtype)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}, not {found}")


def check_integers(name: str, value: Tensor, what: str) -> None:
    """Raise ValueError unless the value has an integer dtype; `what` says what it holds."""
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, {what}, not {value.dtype}")


def check_parameters(
    sizes: dict[str, Any], bias: Any, device: Any, dtype: torch.dtype | None
) -> None:
    """Raise ValueError for arguments of which no module of experts can be made.

    Args:
        sizes: whole numbers by their names.
        bias: a bool.
        device: of the parameters; None: torch's default.
        dtype: of the parameters; None: torch's default.
    """
    check_sizes(**sizes)
    check_bool("bias", bias)
    check_device(device)
    check_float("dtype", torch.get_default_dtype() if dtype is None else dtype)


def check_bool(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def check_device(device: Any) -> None:
    """Raise ValueError unless torch knows such a device; None is its default."""
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is unknown: use cuda, cpu or another one") from None


def check_sizes(**sizes: Any) -> None:
    """Raise ValueError for a value that is no whole number."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise ValueError(f"{name} must be a whole number, not {size!r}")


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError for a tensor on another device than x, which kernels could not read."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device}, the input on {x.device}: move one of them"
            )


def check_choices(x: Tensor, topk_idx: Tensor, topk_prob: Tensor) -> None:
    """Raise ValueError unless tokens [..., D] have ids and weights of K experts [..., K]."""
    check_floats("x", x)
    check_width("x", x)
    check_tensor("topk_idx", topk_idx)
    check_integers("topk_idx", topk_idx, "expert ids")
    check_floats("topk_prob", topk_prob)
    fits = topk_idx.shape == topk_prob.shape and topk_idx.shape[:-1] == x.shape[:-1]
    if not (fits and x.ndim and topk_idx.ndim and topk_idx.shape[-1]):
        raise ValueError(
            f"expected x [..., D] and topk_idx, topk_prob [..., K], not {list(x.shape)}, "
            f"{list(topk_idx.shape)} and {list(topk_prob.shape)}"
        )
    check_devices(x, topk_idx=topk_idx, topk_prob=topk_prob)


def check_weights(weights: Sequence[Any]) -> None:
    """Raise ValueError unless w1 and w2 are [E, ., .], and b1 and b2 [E, .] or None."""
    for name, value in zip(_NAMES, weights, strict=False):
        if value is not None or name in ("w1", "w2"):
            check_floats(name, value)
            shape = "[E, ., .]" if name in ("w1", "w2") else "[E, .]"
            if value.ndim != shape.count(".") + 1:
                raise ValueError(f"{name} must be {shape}, not {list(value.shape)}")
    w1 = weights[0]
    if not len(w1):
        raise ValueError(f"w1 must have at least one expert, not {list(w1.shape)}")
    for name, value in zip(_NAMES, weights, strict=False):
        if value is not None and len(value) != len(w1):
            raise ValueError(f"{name} has {len(value)} experts, w1 has {len(w1)}")


def check_channels(x_name: str, x: Tensor, weights: MLPWeights, halves: int, kind: str) -> None:
    """Raise ValueError unless input and weights in the kernels' layout fit together.

    Args:
        x_name: name of the input x [..., D].
        halves: H / F.
        kind: of the activation.
    """
    w1, w2, b1, b2 = weights
    for name, value in zip(_NAMES, weights, strict=True):
        if value is not None and value.dtype != x.dtype:
            raise ValueError(
                f"{name} is {short(value.dtype)}, {x_name} is {short(x.dtype)}: give them one dtype"
            )
    D, H, F = x.shape[-1], w1.shape[1], w2.shape[2]
    if w1.shape[2] == w2.shape[1] != D:
        raise ValueError(f"{x_name} has {D} channels, w1 and w2 have {w2.shape[1]}")
    if w1.shape[2] != D:
        raise ValueError(f"w1 reads {w1.shape[2]} channels, {x_name} has {D}")
    if w2.shape[1] != D:
        raise ValueError(f"w2 writes {w2.shape[1]} channels, {x_name} has {D}")
    if halves * F != H or not F:
        times = "" if halves == 1 else f"{halves} x "
        raise ValueError(
            f"w1 has {H} rows and w2 {F} columns of an expert: activation={kind} needs {times}as "
            "many rows as columns"
        )
    for name, bias, width in (("b1", b1, H), ("b2", b2, D)):
        if bias is not None and bias.shape[1] != width:
            raise ValueError(f"{name} has {bias.shape[1]} channels, w{name[1]} has {width}")
