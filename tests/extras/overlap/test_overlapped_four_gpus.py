"""On four GPUs, exchanges of passes beside each other: over nodes of two, and with pipeline stages.

Overlapped passes repeat the bits of passes in turn. Inside a node `hier` pushes over NVLink, and
collectives carry blocks between the nodes, two of each kind at a time; stages send activations
beside exchanges of experts.

    python -m pytest -m gpu tests/extras/overlap/test_overlapped_four_gpus.py
"""

from itertools import product

from phalanx.configs.capture import CAPTURED, EAGER
from tests.extras.overlap.test_overlapped_gpu import STEPS, overrides  # noqa: F401
from tests.support.gpu_runs import (  # noqa: F401
    Case,
    Pair,
    names,
    test_every_run_is_a_valid_configuration,
    test_runs_train_alike,
)

GPUS = 4
STAGES = ["parallel.expert=2", "parallel.pipeline=2"]
LAYOUTS = {
    "nodes": ["parallel.expert=4", "parallel.dispatch=hier"],
    "stages": [*STAGES, "parallel.dispatch=alltoall"],
    "chunks": [*STAGES, "parallel.virtual_pipeline=2", "parallel.dispatch=symm"],
}
SECONDS = 300


def _cases() -> dict[str, Case]:
    cases = {}
    each = ("bf16", "fp8_block"), (EAGER, CAPTURED), ("off", "on")
    for layout, *how in product(LAYOUTS, *each):
        given, model = LAYOUTS[layout], "tiny"
        if layout == "nodes":
            model = "deepseek"
            given = given + ["precision.dispatch=fp8"] * (how[0] == "fp8_block")
        cases[names((layout, *how))] = Case(GPUS, overrides(model, given, *how), "2")
    return cases


CASES = _cases()
PAIRS = [Pair(on, f"{on.removesuffix('on')}off") for on in CASES if on.endswith("-on")]
