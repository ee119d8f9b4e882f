"""A model over two pretended nodes of two gloo ranks trains as over one node."""

import functools
from unittest import mock

import pytest

from phalanx.parallel.dispatcher import capacity
from phalanx.parallel.dispatcher.capacity import Budget, Growth
from tests.extras.between_nodes.test_hierarchical import RANKS, SIZE
from tests.support.distributed import run_distributed
from tests.support.training import _loaded, _train, pretended_nodes

pytestmark = pytest.mark.dist
SMALL = (
    "model=tiny model.layers=2 run.steps=3 run.eval_interval=0 parallel.expert=4 "
    "parallel.capacity_factor=8 data.sequence_length=32 data.micro_batch=1 data.global_batch=4"
)


def _steps(overrides: list[str]) -> list[tuple[float, float]]:
    with pretended_nodes(SIZE):
        records = _train(_loaded(*overrides)).records
    return [(r["loss"], r["grad_norm"]) for r in records if "grad_norm" in r]


@functools.cache
def steps(*overrides: str) -> list[tuple[float, float]]:
    """Losses and gradient norms, trained once for all tests."""
    return run_distributed(_steps, RANKS, [*SMALL.split(), *overrides])[0]


def losses(*overrides: str) -> list[float]:
    return [loss for loss, _ in steps(*overrides)]


def test_a_model_trains_as_with_collectives() -> None:
    """In fp32, where all that differs is the order of sums over four ranks."""
    theirs, ours = (
        losses(f"parallel.dispatch={name}", "precision=fp32") for name in ("alltoall", "hier")
    )
    assert len(ours) == 3 and ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "moe"])
def test_rows_that_travel_in_fp8_change_no_loss(recompute: str) -> None:
    given = ["precision=fp8_block", "parallel.dispatch=hier", f"run.recompute={recompute}"]
    bf16, fp8 = (losses(*given, f"precision.dispatch={rows}") for rows in ("bf16", "fp8"))
    assert len(fp8) == 3 and fp8 == bf16


def small_blocks(overrides: list[str]) -> tuple[list[tuple[float, float]], list[Growth]]:
    """Losses and gradient norms of steps that begin with blocks for the balanced load."""
    grown: list[Growth] = []
    grow = Budget.grow

    def noted(budget: Budget) -> list[Growth]:
        grown.extend(found := grow(budget))
        return found

    with (
        pretended_nodes(SIZE),
        mock.patch.object(capacity, "block_factor", return_value=1.0),
        mock.patch.object(Budget, "grow", noted),
    ):
        records = _train(_loaded(*overrides)).records
    return [(r["loss"], r["grad_norm"]) for r in records if "grad_norm" in r], grown


@pytest.mark.parametrize("recompute", ["none", pytest.param("moe", marks=pytest.mark.slow)])
def test_steps_whose_blocks_are_too_small_are_rerun(recompute: str) -> None:
    """Results are those of blocks with room, bit for bit."""
    given = ["parallel.dispatch=hier", "precision=fp32"]
    roomy = steps(*given)
    given = [*SMALL.split(), *given, f"run.recompute={recompute}"]
    small, grown = run_distributed(small_blocks, RANKS, given)[0]
    assert small == roomy and len(small) == 3
    assert grown and all(growth.between_nodes for growth in grown)
    assert grown[0].event("step 1").startswith("blocks between nodes needed 1.")
