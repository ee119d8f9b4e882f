"""The backend that a call of a function of experts takes, without the call.

Legend: E experts, D hidden, F expert width, H = 2F for gated activations and F for others.
"""

from typing import Unpack

from torch import Tensor

from phalanx.kernels.functional.arguments import check_floats, check_weights
from phalanx.kernels.functional.choice import BackendChoice, Problem, explain
from phalanx.kernels.functional.experts import local, product_dtype
from phalanx.kernels.functional.layouts import layout_named
from phalanx.kernels.functional.options import ExpertOptions, constants, with_defaults


def resolve_backend(
    x: Tensor, w1: Tensor, w2: Tensor, top_k: int | None = None, **options: Unpack[ExpertOptions]
) -> BackendChoice:
    """The backend that `grouped_experts` takes for these tensors, and why it is that one.

    >>> import torch
    >>> from phalanx.kernels.api import resolve_backend
    >>> x, w1, w2 = torch.randn(16, 64), torch.randn(8, 2 * 128, 64), torch.randn(8, 64, 128)
    >>> choice = resolve_backend(x, w1, w2, top_k=2)
    >>> choice.backend, choice.reads_counts
    ('reference', True)

    Args:
        x: [..., D] tokens, or rows sorted by expert, of which dtype and device are read. Under
            torch.autocast the dtype is that of autocast.
        w1: [E, H, D] of this rank, or as `layout` says.
        w2: [E, D, F] of this rank, or as `layout` says.
        top_k: experts of a token; None: the rows are sorted, as for `grouped_experts_sorted`.
        options: those of the call.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an unknown value of an option, or a backend that cannot run here.
    """
    chosen = with_defaults(options)
    check_floats("x", x)
    check_weights((w1, w2))
    stored = layout_named(chosen["layout"])
    E, D, F = (local(w2).mT if stored.transposed else local(w2)).shape
    problem = Problem(x.device, product_dtype(x), D, F, E, top_k or 0, top_k is None)
    return explain(constants(chosen), problem)
