"""Parameters gathered beside captured forward passes of four GPUs, with validation between steps.

python -m pytest -m gpu tests/end_to_end/layouts/test_param_gather_gpu.py
"""

from itertools import product

from phalanx.configs.capture import CAPTURED, EAGER
from tests.support.gpu_runs import (  # noqa: F401
    Case,
    Pair,
    names,
    test_every_run_is_a_valid_configuration,
    test_runs_train_alike,
    training,
)

GPUS = 4
LAYOUTS = {
    "data": ["parallel.expert=1"],
    "expert": ["parallel.expert=2"],
    "muon": ["parallel.expert=2", "optim=muon"],
    "chunks": ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
    "overlapped": ["parallel.expert=2", "parallel.overlap_microbatches=on"],
}
STEPS = 7
TRAINING = training(
    *(STEPS, 16, "optim.lr=2e-4"),
    # Before the first captured step, which is the third, and after captured ones.
    *["run.eval_interval=1", "run.eval_batches=1"],
    *["model=tiny", "model.layers=8"],
    *["model.hidden=1024", "model.moe.ffn=1024"],  # two layers of experts fill a bucket
)
AFTER = "parallel.overlap=false"
"""Parameters are gathered after the update."""
LAYOUTS |= {f"{name}_after": [*LAYOUTS[name], AFTER] for name in ("data", "expert", "chunks")}
CASES = {
    names((layout, graph)): Case(GPUS, [*TRAINING, *how, f"run.graph={graph}"])
    for (layout, how), graph in product(LAYOUTS.items(), (EAGER, CAPTURED))
}
SECONDS = 300


VALUES = ("loss", "grad_norm", "valid_loss")
PAIRS = [Pair(names((of, CAPTURED)), names((of, EAGER)), values=VALUES) for of in LAYOUTS]
