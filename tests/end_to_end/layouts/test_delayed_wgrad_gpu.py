"""Weight gradients that wait for transfers between two GPUs are those of the backward pass.

python -m pytest -m gpu tests/end_to_end/layouts/test_delayed_wgrad_gpu.py
"""

from itertools import product

import pytest

from phalanx.configs.capture import CAPTURED, EAGER
from tests.support.gpu_runs import RANKS, Case, Outcome, check_valid, names, steps_of

STAGES = ["parallel.pipeline=2"]
INTERLEAVED = [*STAGES, "parallel.virtual_pipeline=2"]
UNEVEN = {
    "tiny_gpt_oss": [*STAGES, "parallel.pipeline_layout='Ettt|tL'"],
    "tiny_deepseek": [*STAGES, "parallel.pipeline_layout='Ettt|tmL'"],
}
"""Stages of which the second has memory to hold a micro-batch's gradients longer."""
KNOBS = {
    "tied": ["model.tie_embeddings=true"],
    "recomputed": ["run.recompute=[norm,attention,expert_h]"],
    "full": ["run.recompute=full", "run.offload=residual"],
    "offloaded": ["run.offload=[residual,expert_h]"],
    "muon": ["optim=muon", "optim.moments=bf16"],
}
"""Knobs that change what a backward pass saves or computes, with one model."""
STEPS = 8
TRAINING = [
    *["run.device=cuda", f"run.steps={STEPS}", "run.save_interval=-1", "kernels=fused"],
    *["data.sequence_length=256", "data.micro_batch=2", "data.global_batch=16"],
    *["optim.warmup_steps=2", "optim.lr=1e-3", "run.eval_interval=8", "run.eval_batches=2"],
    "parallel.capacity_factor=8",  # a rerun is an eager step, and a capture of some seconds
    "parallel.timeout=60",
]
SECONDS = 540


def _runs() -> dict[str, list[str]]:
    """Overrides of runs that are to have the same bits however weight gradients are computed."""
    runs = {}
    for model, recipe in product(UNEVEN, ("bf16", "fp8_block")):
        layouts = {"stages": STAGES, "interleaved": INTERLEAVED, "uneven": UNEVEN[model]}
        for layout, how in layouts.items():
            given = [f"model={model}", f"precision={recipe}", *TRAINING, *how]
            runs[names((model, recipe, layout))] = given
    for (knob, more), interleaved in product(KNOBS.items(), (False, True)):
        how = INTERLEAVED if interleaved else UNEVEN["tiny_deepseek"]
        layout = "interleaved" if interleaved else "uneven"
        runs[names(("tiny_deepseek", knob, layout))] = [
            *["model=tiny_deepseek", *TRAINING, *how],
            *more,
        ]
    return runs


RUNS = _runs()
WAYS = {
    "never": ["parallel.delay_wgrad=off", f"run.graph={EAGER}"],
    "eager": ["parallel.delay_wgrad=on", f"run.graph={EAGER}"],
    "graph": ["parallel.delay_wgrad=on", f"run.graph={CAPTURED}"],
}
CASES = {
    names((name, way)): Case(RANKS, [*given, *how])
    for name, given in RUNS.items()
    for way, how in WAYS.items()
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_bits_are_the_same(name: str, outcomes: dict[str, Outcome]) -> None:
    """Eager and captured, as in steps that compute them in the backward pass."""
    found = {}
    for way in WAYS:
        steps = steps_of(outcomes[names((name, way))], STEPS)
        values = ("loss", "grad_norm", "valid_loss", "mtp_loss")
        found[way] = [[step.get(value) for value in values] for step in steps]
    assert found["eager"] == found["never"]
    assert found["graph"] == found["never"]


def test_every_run_is_a_valid_configuration() -> None:
    check_valid(CASES.values())
