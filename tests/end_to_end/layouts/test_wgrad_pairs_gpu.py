"""Weight gradients of two micro-batches at once train as those of one at a time, on two GPUs.

A sum is rounded once for both, so that losses are close and not equal bit for bit; a graph has the
bits of eager steps.

python -m pytest -m gpu tests/end_to_end/layouts/test_wgrad_pairs_gpu.py
"""

from itertools import product

import pytest

from phalanx.configs.capture import CAPTURED, EAGER
from tests.end_to_end.layouts.test_delayed_wgrad_gpu import (
    INTERLEAVED,
    KNOBS,
    STAGES,
    STEPS,
    TRAINING,
    UNEVEN,
)
from tests.support.gpu_runs import (  # noqa: F401
    LOSSES,
    RANKS,
    Case,
    Outcome,
    Pair,
    names,
    steps_of,
    test_every_run_is_a_valid_configuration,
    test_runs_train_alike,
)

LAYOUTS = {
    "stages": STAGES,
    "interleaved": INTERLEAVED,
    "alone": ["parallel.expert=1", "data.global_batch=12"],
}
"""Without stages a rank has three micro-batches, with them eight."""
RUNS = {
    names((model, recipe, layout)): [f"model={model}", f"precision={recipe}", *TRAINING, *how]
    for model, recipe, (layout, how) in product(UNEVEN, ("bf16", "fp8_block"), LAYOUTS.items())
}
RUNS |= {
    names(("tiny_deepseek", knob, "uneven")): [
        *["model=tiny_deepseek", *TRAINING, *UNEVEN["tiny_deepseek"]],
        *more,
    ]
    for knob, more in KNOBS.items()
}
WAYS = {
    "single": ["parallel.delay_wgrad=off", f"run.graph={EAGER}"],
    "eager": ["parallel.delay_wgrad=pairs", f"run.graph={EAGER}"],
    "graph": ["parallel.delay_wgrad=pairs", f"run.graph={CAPTURED}"],
}
CASES = {
    names((name, way)): Case(RANKS, [*given, *how])
    for name, given in RUNS.items()
    for way, how in WAYS.items()
}
SECONDS = 540
PAIRS = [
    *(Pair(names((name, "graph")), names((name, "eager"))) for name in RUNS),
    *(Pair(names((name, "eager")), names((name, "single")), close=True) for name in RUNS),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_sums_are_rounded_once_for_two_micro_batches(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    eager, single = (
        [[step[value] for value in LOSSES] for step in steps_of(outcomes[run], STEPS)]
        for run in (names((name, "eager")), names((name, "single")))
    )
    # nothing was trained before the first loss, which tells whether the routing is the same
    assert eager[0][0] == single[0][0]
    # With wgrad_bf16 one micro-batch is added after the other; the one pair of `alone` differs in
    # last bits of FP8 sums, which rounded weights may not show.
    if "wgrad_bf16" not in name and "fp8_block-alone" not in name:
        assert eager != single
