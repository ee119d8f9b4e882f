"""Rows of parameters multiplied after their update, in what optimizers update in their place.

Right behind the optimizer's own step, before Megatron-Core copies master weights to the model and
gathers them: masters, shards of them and weights cannot differ, and a checkpoint has what the next
step computes with. Everything stays on the device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.elementwise.adam import merged, split_
from phalanx.parallel.megatron.updated import Updated, parts, updated

_SLICE = 16 << 20  # elements that are merged to master weights at a time: 64 MiB of fp32

Factors = Callable[[], Sequence[Tensor] | None]
"""Factors of the rows of some parameters, in order: fp32 [rows] each; None changes none."""


def after_updates(optimizer: Any, parameters: Sequence[Tensor], factors: Factors) -> None:
    """Have every later step of an optimizer that Megatron-Core built rescale `parameters`.

    Args:
        optimizer: with what it updates in place.
        parameters: of this rank's model, matrices or vectors.
        factors: is asked once per step.
    """
    order = {id(p): i for i, p in enumerate(parameters)}
    for part in parts(optimizer):
        own = [(u, order[id(u.parameter)]) for u in updated(part) if id(u.parameter) in order]
        if own:
            hook = partial(_rescale_all, own=own, factors=factors)
            part.optimizer.register_step_post_hook(hook)


@torch.no_grad()
def _rescale_all(
    optimizer: torch.optim.Optimizer,
    *_: Any,
    own: Sequence[tuple[Updated, int]],
    factors: Factors,
) -> None:
    if (found := factors()) is not None:
        for part, i in own:
            rescale_(part, found[i], optimizer.state.get(part.main, {}).get("remainder"))


def rescale_(part: Updated, factor_R: Tensor, remainder: Tensor | None = None) -> None:
    """Multiply what is updated in place of elements of a parameter.

    Args:
        part: of a parameter whose first axis has R rows.
        factor_R: fp32.
        remainder: what a bf16 `part.main` lacks of its master copy, which is what is multiplied.
    """
    assert part.parameter.size(0) == factor_R.numel()
    columns = part.parameter.numel() // factor_R.numel()
    tensors = [part.main, *(() if remainder is None else (remainder,))]
    flat = [t.detach().view(-1) for t in tensors]
    for begin, end in _blocks(part.start, part.stop, columns):
        of_rows = factor_R[begin // columns : -(-end // columns), None]
        pieces = [t[begin - part.start : end - part.start].view(len(of_rows), -1) for t in flat]
        if remainder is None:
            pieces[0].mul_(of_rows)
        else:
            split_(merged(*pieces).mul_(of_rows), *pieces)


def _blocks(start: int, stop: int, columns: int) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) of a matrix: blocks of whole rows, and parts of rows at the ends."""
    many = max(1, _SLICE // columns) * columns
    while start < stop:
        end = start + many if start % columns == 0 else start - start % columns + columns
        if end > stop:
            end = stop if stop - start < columns else stop - stop % columns
        yield start, end
        start = end
