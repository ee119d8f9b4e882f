"""Rows in FP8 over nodes: bits of rows that are quantised on arrival, and of other transports."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatcher.transport import choose_transport
from phalanx.parallel.dispatcher.transport_class import Transport
from tests.parallel.dispatcher.test_fp8_rows import (
    DEFAULTS,
    OTHERS,
    Given,
    assert_same,
    both,
    check_pushed,
    check_weight_gradients_in_bf16,
    dispatcher_of,
    drawn,
    layer,
    over,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow, slow


def _same_over_nodes(recipe: Fp8Block, size: int) -> list[Tensor]:
    early, late = both("hier", recipe, size)
    assert_same(early, late)
    assert_same(early, both("alltoall", recipe)[0])
    return early


def joined(ranks: list[Given]) -> Given:
    """All tokens and experts on one rank."""
    return Given(*map(torch.cat, zip(*ranks, strict=True)))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("recipe", "ranks", "size"),
    [
        (DEFAULTS, 4, 2),
        (OTHERS, 4, 2),
        *slow((OTHERS, 8, 2), (DEFAULTS, 8, 4)),
        pytest.param(DEFAULTS, 8, 2, marks=pytest.mark.slow),
        pytest.param(OTHERS, 8, 4, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_over_nodes(recipe: Fp8Block, ranks: int, size: int) -> None:
    """Results are those with collectives, and those on one rank."""
    by_rank = run_distributed(_same_over_nodes, ranks, recipe, size)
    alone = dispatcher_of(choose_transport("local", None, torch.bfloat16), recipe)
    here = layer(alone, joined([drawn(rank, ranks) for rank in range(ranks)]), recipe)
    assert_same(list(map(torch.cat, zip(*by_rank, strict=True))), here)


def _pushed(recipe: Fp8Block) -> None:
    inside = Transport("symm", "in this test")
    check_pushed(recipe, replace(over("hier"), inside=inside))


@pytest.mark.dist
@mostly_slow("recipe", [DEFAULTS, OTHERS], OTHERS)
def test_pushes_inside_nodes_bring_the_same_bits(recipe: Fp8Block) -> None:
    run_distributed(_pushed, 4, recipe)


@pytest.mark.dist
def test_weight_gradients_in_bf16_read_what_has_come() -> None:
    run_distributed(check_weight_gradients_in_bf16, 4, "hier")
