"""Parameters gathered beside captured forward passes of four GPUs, with validation between steps.

python -m pytest -m gpu tests/end_to_end/layouts/test_param_gather_gpu.py
"""

from itertools import product

import pytest

from phalanx.configs.capture import CAPTURED, EAGER
from tests.support.gpu_runs import Case, Outcome, check_valid, names, steps_of

GPUS = 4
LAYOUTS = {
    "data": ["parallel.expert=1"],
    "expert": ["parallel.expert=2"],
    "muon": ["parallel.expert=2", "optim=muon"],
    "chunks": ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
    "overlapped": ["parallel.expert=2", "parallel.overlap_microbatches=on"],
}
STEPS = 7
TRAINING = [
    *["run.device=cuda", f"run.steps={STEPS}", "run.save_interval=-1", "kernels=fused"],
    # Before the first captured step, which is the third, and after captured ones.
    *["run.eval_interval=1", "run.eval_batches=1"],
    *["model=tiny", "model.layers=8"],
    *["model.hidden=1024", "model.moe.ffn=1024"],  # two layers of experts fill a bucket
    *["data.sequence_length=256", "data.micro_batch=2", "data.global_batch=16"],
    *["optim.warmup_steps=2", "optim.lr=2e-4", "parallel.timeout=60"],
    "parallel.capacity_factor=8",  # a rerun is an eager step, and a capture of some seconds
]
AFTER = "parallel.overlap=false"
"""Parameters are gathered after the update."""
LAYOUTS |= {f"{name}_after": [*LAYOUTS[name], AFTER] for name in ("data", "expert", "chunks")}
CASES = {
    names((layout, graph)): Case(GPUS, [*TRAINING, *how, f"run.graph={graph}"])
    for (layout, how), graph in product(LAYOUTS.items(), (EAGER, CAPTURED))
}
SECONDS = 300


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_the_same(layout: str, outcomes: dict[str, Outcome]) -> None:
    """Eager and captured: losses, gradient norms and validation."""
    values = ("loss", "grad_norm", "valid_loss")
    eager, captured = (
        [[step[value] for value in values] for step in steps_of(outcomes[name], STEPS)]
        for name in (names((layout, graph)) for graph in (EAGER, CAPTURED))
    )
    assert captured == eager


def test_every_run_is_a_valid_configuration() -> None:
    check_valid(CASES.values())
