"""With Transformer Engine installed two GPUs train as without, and its attention trains like fa4.

Needs the package, without which `auto` chooses the same optimizer and, for these heads, `fa4`:

    python -m pytest -m gpu tests/end_to_end/layouts/test_transformer_engine_two_gpus.py
"""

import pytest

from phalanx.configs.capture import CAPTURED, EAGER
from tests.end_to_end.layouts.test_two_gpus import STEPS, TRAINING, check_close
from tests.support.gpu_runs import RANKS, Case, Outcome, check_valid, losses_of, names

LAYOUTS = {
    "expert": (["parallel.expert=2"], CAPTURED),
    "tensor": (["parallel.tensor=2", "parallel.expert=2"], CAPTURED),
    "context": (["parallel.context=2", "parallel.expert=2"], EAGER),
}
COMMON = ["model=tiny", *TRAINING]
CASES = {
    names((attention, layout)): Case(
        RANKS, [*COMMON, *how, f"run.graph={graph}", f"kernels.attention={attention}"]
    )
    for layout, (how, graph) in LAYOUTS.items()
    for attention in ("fa4", "te")
} | {
    names(("eager", layout)): Case(
        RANKS, [*COMMON, *how, f"run.graph={EAGER}", "kernels.attention=fa4"]
    )
    for layout, (how, _) in LAYOUTS.items()
}
SECONDS = 200


@pytest.fixture(autouse=True)
def _has_transformer_engine(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        pytest.importorskip("transformer_engine")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_attention_trains_like_fa4(layout: str, outcomes: dict[str, Outcome]) -> None:
    te, fa4 = (losses_of(outcomes[names((by, layout))], STEPS) for by in ("te", "fa4"))
    check_close(te, fa4)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [name for name, (_, g) in LAYOUTS.items() if g == CAPTURED])
def test_a_graph_repeats_the_bits_of_eager_steps(layout: str, outcomes: dict[str, Outcome]) -> None:
    """As its optimizer is nobody's default."""
    graph, eager = (losses_of(outcomes[names((how, layout))], STEPS) for how in ("fa4", "eager"))
    assert graph == eager


def test_every_run_is_a_valid_configuration() -> None:
    check_valid(CASES.values())
