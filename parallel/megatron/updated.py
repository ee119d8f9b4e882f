"""Tensors that the optimizers of Megatron-Core update, and what follows their updates.

Rows of parameters are rescaled behind the optimizer's own step, before Megatron-Core copies master
weights to the model and gathers them: masters, shards and weights cannot differ. Averages
(`optim.ema`) are fp32 beside the moments, saved, loaded and moved between layouts as these are;
they follow every update, also a captured one, and no skipped step. All of it is on the device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from phalanx.kernels.elementwise.adam import merged, split_

_SLICE = 16 << 20  # elements that are merged to master weights at a time: 64 MiB of fp32


class Updated(NamedTuple):
    """Elements [start, stop) of a parameter, flattened."""

    parameter: Tensor
    start: int
    stop: int
    main: Tensor  # tensor that is updated in their place: a master copy, or a view of them


def parts(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, or the one."""
    # A stage without a kind of parameter (experts, say) has a stub in place of its optimizer.
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def updated(part: Any) -> Iterator[Updated]:
    """All that one of `parts` updates on this rank."""
    if isinstance(part, DistributedOptimizer):
        buckets = (b for ranges in part.gbuf_ranges for bs in ranges.values() for b in bs)
        for bucket in buckets:
            for parameter, ranges in bucket["param_map"].items():
                own = ranges["param"]
                group, order = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][order]
                yield Updated(parameter, own.start, own.end, main)
        return
    masters = {
        id(main): parameter
        for parameters, mains in zip(
            getattr(part, "float16_groups", []),
            getattr(part, "fp32_from_float16_groups", []),
            strict=True,
        )
        for parameter, main in zip(parameters, mains, strict=True)
    }
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            parameter = masters.get(id(main), main)
            yield Updated(parameter, 0, parameter.numel(), main)


Factors = Callable[[], Sequence[Tensor] | None]
"""Factors of the rows of parameters, in order: fp32 [rows] each; None changes none."""


def after_updates(optimizer: Any, parameters: Sequence[Tensor], factors: Factors) -> None:
    """Have every later step of an optimizer rescale `parameters`, matrices or vectors."""
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
    """Multiply what is updated in place of elements of a parameter, whose first axis has R rows.

    `remainder`: what a bf16 `part.main` lacks of its master copy, which is what is multiplied.
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


AVERAGE = "ema"
"""Name of an average in an optimizer's state, and in a checkpoint (`optimizer.state.ema`)."""


class Averages:
    """Averages of all weights that an optimizer updates on this rank; they begin with the weights.

    `decay`: part of an average that an update leaves, between 0 and 1.
    """

    def __init__(self, optimizer: Any, decay: float) -> None:
        self._optimizer, self._decay = optimizer, decay
        begin_averages(optimizer)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, after an update: decay x old + rest x weights."""
        for state, main in _states(self._optimizer):
            for average, weights in _slices(state[AVERAGE], main, state.get("remainder")):
                average.lerp_(weights, 1.0 - self._decay)


@torch.no_grad()
def begin_averages(optimizer: Any) -> None:
    """Let the averages begin with the weights, as where a checkpoint has none."""
    for state, main in _states(optimizer):
        if AVERAGE not in state:
            state[AVERAGE] = torch.empty_like(main, dtype=torch.float32, requires_grad=False)
        for average, weights in _slices(state[AVERAGE], main, state.get("remainder")):
            average.copy_(weights)


def has_averages(optimizer: Any) -> bool:
    """Return whether an optimizer of this rank has averages."""
    # The state of a weight that has none must not begin here: `state[p]` of a default dictionary
    # would add one, in an order that is not that of the optimizer.
    states = (each for part in parts(optimizer) for each in part.optimizer.state.values())
    return any(AVERAGE in state for state in states)


def _states(optimizer: Any) -> Iterator[tuple[dict[str, Any], Tensor]]:
    for part in parts(optimizer):
        for each in updated(part):
            yield part.optimizer.state[each.main], each.main.detach()


def _slices(
    average: Tensor, main: Tensor, remainder: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """An average and its weights in fp32; in slices where these have to be merged."""
    average, main = average.view(-1), main.view(-1)
    if remainder is None:
        yield average, main
        return
    sizes = zip(average.split(_SLICE), main.split(_SLICE), strict=True)
    for (held, weight), rest in zip(sizes, remainder.view(-1).split(_SLICE), strict=True):
        yield held, merged(weight, rest)
