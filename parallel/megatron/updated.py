"""Tensors that the optimizers of Megatron-Core update, and the parameters they are part of."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


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
