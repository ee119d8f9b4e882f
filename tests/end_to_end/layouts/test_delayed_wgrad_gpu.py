"""Weight gradients that wait for transfers between two GPUs are those of the backward pass.

python -m pytest -m gpu tests/end_to_end/layouts/test_delayed_wgrad_gpu.py
"""

from itertools import product

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
TRAINING = training(STEPS, 16, "optim.lr=1e-3", "run.eval_interval=8", "run.eval_batches=2")
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


VALUES = ("loss", "grad_norm", "valid_loss", "mtp_loss")
PAIRS = [
    Pair(names((name, way)), names((name, "never")), values=VALUES)
    for name, way in product(RUNS, ("eager", "graph"))
]
