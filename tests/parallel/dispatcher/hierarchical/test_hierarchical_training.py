"""A model over two pretended nodes of two gloo ranks trains as over one node."""

import pytest

from tests.parallel.dispatcher.hierarchical.test_hierarchical import RANKS, SIZE, pretended
from tests.support.distributed import run_distributed
from tests.support.training import _loaded, _train

pytestmark = pytest.mark.dist
SMALL = (
    "model=tiny run.steps=3 run.eval_interval=0 parallel.expert=4 "
    "data.sequence_length=32 data.micro_batch=1 data.global_batch=4"
)


def losses(overrides: list[str]) -> list[float]:
    with pretended(SIZE):
        return [step["loss"] for step in _train(_loaded(*overrides)).records if "grad_norm" in step]


def test_a_model_trains_as_with_collectives() -> None:
    """In fp32, where all that differs is the order of sums over four ranks."""
    given = [*SMALL.split(), "precision=fp32"]
    theirs, ours = (
        run_distributed(losses, RANKS, [*given, f"parallel.dispatch={name}"])[0]
        for name in ("alltoall", "hier")
    )
    assert len(ours) == 3 and ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "moe"])
def test_rows_that_travel_in_fp8_change_no_loss(recompute: str) -> None:
    given = ["precision=fp8_block", "parallel.dispatch=hier", f"run.recompute={recompute}"]
    bf16, fp8 = (
        run_distributed(losses, RANKS, [*SMALL.split(), *given, f"precision.dispatch={rows}"])[0]
        for rows in ("bf16", "fp8")
    )
    assert len(fp8) == 3 and fp8 == bf16
