"""Every layout of two GPUs trains like one GPU, and captured steps equal eager ones bit for bit.

All that the defaults choose on a Hopper GPU: fused kernels, `symm`, SMs for exchanges. This is what
runs before a release, in two to four minutes on two GPUs (docs/measured/training/two_gpus.md):

    python -m pytest -m gpu tests/end_to_end/layouts/test_two_gpus.py
"""

from collections.abc import Iterator
from itertools import product

import pytest

from phalanx.configs.capture import CAPTURED, EAGER
from tests.support.gpu_runs import (  # noqa: F401
    RANKS,
    Case,
    Pair,
    names,
    test_every_run_is_a_valid_configuration,
    test_runs_train_alike,
    training,
)

pytestmark = pytest.mark.extras

MODELS = ["tiny", "tiny_deepseek", "tiny_gpt_oss", "tiny_qwen3_next"]
RECIPES = ["bf16", "fp8_block"]
OPTIMIZERS = ["adamw", "muon"]
LAYOUTS = {
    "data": ["parallel.expert=1"],
    "expert": ["parallel.expert=2"],
    "tensor": ["parallel.tensor=2", "parallel.expert=2"],
    "context": ["parallel.context=2", "parallel.expert=2"],
    "pipeline": ["parallel.pipeline=2"],
    "interleaved": ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
}
ROWS_IN_BF16 = "precision.dispatch=bf16"
STEPS = 10
TRAINING = training(STEPS, 8, "optim.lr=1e-3")
SECONDS = 540


def _cases() -> dict[str, Case]:
    """Runs by name: every model in every precision and layout.

    Every model in every precision on every layout, captured; eager steps in bf16, as the kernels of
    FP8 are captured by themselves elsewhere; and Muon with every model on every layout in one
    precision.
    """
    actual = {}
    for (i, model), (j, recipe) in product(enumerate(MODELS), enumerate(RECIPES)):
        for kind in OPTIMIZERS if i % 2 == j else OPTIMIZERS[:1]:
            common = [f"model={model}", f"precision={recipe}", f"optim={kind}", *TRAINING]
            actual[names((model, recipe, kind, "one"))] = Case(1, [*common, f"run.graph={EAGER}"])
            graphs = [EAGER, CAPTURED] if (kind, recipe) == ("adamw", "bf16") else [CAPTURED]
            for layout, how in LAYOUTS.items():
                for graph in graphs:
                    overrides = [*common, *how, f"run.graph={graph}"]
                    actual[names((model, recipe, kind, layout, graph))] = Case(RANKS, overrides)
            if (kind, recipe) == ("adamw", "fp8_block"):
                given = [*common, *LAYOUTS["expert"], f"run.graph={CAPTURED}", ROWS_IN_BF16]
                actual[names((model, recipe, kind, "expert", "rows"))] = Case(RANKS, given)
    return actual


CASES = _cases()


def _pairs() -> Iterator[Pair]:
    """Every layout as one GPU, graphs as eager steps, rows in FP8 as those in bf16."""
    for name in (name for name, case in CASES.items() if case.ranks == RANKS):
        model, recipe, kind, *_ = name.split("-")
        yield Pair(name, names((model, recipe, kind, "one")), close=True)
        if name.endswith(CAPTURED) and (eager := name.replace(CAPTURED, EAGER)) in CASES:
            yield Pair(name, eager)
        if name.endswith("rows"):
            yield Pair(name, name.removesuffix("rows") + CAPTURED)


PAIRS = [*_pairs()]
CHECKED = "bf16-adamw"
"""No layout's rules depend on precision and optimizer."""
