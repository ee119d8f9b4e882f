"""Collectives of tensor ranks in backward passes: another group, and another buffer."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.megatron.imports import importing_megatron
from tests.support.distributed import run_distributed

_COLLECTIVES = "all_gather", "reduce_scatter"


def _used() -> tuple[list[bool], list[int], int]:
    """Whether the groups of collectives are the given one, ranks of these, and buffers."""
    with importing_megatron():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import layers, mappings

    groups = list[Any]()

    def noted(*_: Any, group: Any) -> None:
        groups.append(group)

    # Ranks serve other tests after this one, which need what is replaced here.
    with ExitStack() as replaced:
        for owner, name, value in (
            *((m, f"dist_{n}_func", noted) for m in (layers, mappings) for n in _COLLECTIVES),
            (torch.cuda, "current_device", lambda: "cpu"),
            (parallel_state, "_GLOBAL_MEMORY_BUFFER", None),
        ):
            replaced.enter_context(mock.patch.object(owner, name, value))
        return _of_two_passes(groups)


def _of_two_passes(groups: list[Any]) -> tuple[list[bool], list[int], int]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers, mappings

    from phalanx.extras.overlap.tensor import separate

    buffers = list[Any]()
    pairs: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = pairs[dist.get_rank() // 2]
    for _ in range(2):  # a second run in the process
        separate(group)

    def gather() -> None:
        layers.dist_all_gather_func(None, None, group=group)
        mappings.dist_reduce_scatter_func(None, None, group=group)
        layers.dist_all_gather_func(None, None, group=dist.group.WORLD)
        buffers.append(parallel_state.get_global_memory_buffer().get_tensor((2,), torch.float, "x"))

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            gather()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            gather()
            return grad

    Layer.apply(torch.zeros(1, requires_grad=True)).sum().backward()
    ranks = dist.get_process_group_ranks(groups[3])
    return [g is group for g in groups], ranks, len({b.data_ptr() for b in buffers})


@pytest.mark.dist
def test_backward_passes_have_a_group_and_a_buffer_of_their_own() -> None:
    for rank, (same, ranks, buffers) in enumerate(run_distributed(_used, 4)):
        assert same == [True, True, False, False, False, False]
        assert ranks == ([0, 1] if rank < 2 else [2, 3]) and buffers == 2
