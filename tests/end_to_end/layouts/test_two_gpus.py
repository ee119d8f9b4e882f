"""Every layout of two GPUs trains like one GPU, and captured steps equal eager ones bit for bit.

All that the defaults choose on a Hopper GPU: fused kernels, `symm`, SMs for exchanges. This is what
runs before a release, in two to four minutes on two GPUs (docs/measured/training/two_gpus.md):

    python -m pytest -m gpu tests/end_to_end/layouts/test_two_gpus.py
"""

from itertools import product

import pytest

from phalanx.configs.capture import CAPTURED, EAGER
from tests.support.gpu_runs import RANKS, Case, Outcome, check_valid, losses_of, names

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
TRAINING = [
    *["run.device=cuda", f"run.steps={STEPS}", "run.save_interval=-1", "kernels=fused"],
    *["data.sequence_length=256", "data.micro_batch=2", "data.global_batch=8"],
    *["optim.warmup_steps=2", "optim.lr=1e-3"],
    "parallel.capacity_factor=8",  # a rerun is an eager step, and a capture of some seconds
    "parallel.timeout=60",
]
LOSS, NORM = 5e-3, 5e-2
"""Relative tolerance. In bf16 nearly tied choices of experts differ between layouts."""
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
PAIRS = [name for name, case in CASES.items() if case.ranks == RANKS]


def check_close(got: list[tuple[float, float]], want: list[tuple[float, float]]) -> None:
    """Losses and gradient norms of two layouts."""
    for i, tolerance in enumerate((LOSS, NORM)):
        assert [step[i] for step in got] == pytest.approx([s[i] for s in want], rel=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS)
def test_two_gpus_train_as_one(name: str, outcomes: dict[str, Outcome]) -> None:
    got = losses_of(outcomes[name], STEPS)
    model, recipe, kind, *_ = name.split("-")
    want = losses_of(outcomes[names((model, recipe, kind, "one"))], STEPS)
    check_close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [n for n in PAIRS if CAPTURED in n and n.replace(CAPTURED, EAGER) in PAIRS]
)
def test_a_graph_repeats_the_bits_of_eager_steps(name: str, outcomes: dict[str, Outcome]) -> None:
    eager = name.replace(CAPTURED, EAGER)
    assert losses_of(outcomes[name], STEPS) == losses_of(outcomes[eager], STEPS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in PAIRS if n.endswith("rows")])
def test_rows_in_fp8_change_no_bit(name: str, outcomes: dict[str, Outcome]) -> None:
    fp8 = name.removesuffix("rows") + CAPTURED
    assert losses_of(outcomes[name], STEPS) == losses_of(outcomes[fp8], STEPS)


@pytest.mark.extras
def test_every_run_is_a_valid_configuration() -> None:
    """On any machine, for one precision and optimizer, of which no layout's rules depend."""
    check_valid(case for name, case in CASES.items() if "bf16-adamw" in name)
