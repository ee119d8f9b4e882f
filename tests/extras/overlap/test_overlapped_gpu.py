"""On two GPUs, forward passes beside backward passes repeat the bits of passes one after the other.

Eager and captured in a graph, in bf16 and FP8, with multi-token prediction, recomputation and
offloading, with each transport and tensor ranks, and with pipeline stages whose experts are on one
rank each. The 30 steps of each run also show that the exchanges of two passes at a time do not
block each other.

    python -m pytest -m gpu tests/extras/overlap/test_overlapped_gpu.py
"""

from itertools import product
from typing import Any

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

STEPS = 30
TRAINING = training(STEPS, 32, "optim.lr=1e-3")
MODELS = {
    "tiny": [
        "model=tiny",
        "model.moe.router.aux_loss=0.01",
        "model.moe.router.global_aux_loss=0.01",
    ],
    "deepseek": ["model=tiny_deepseek", "model.moe.shared_ffn=128", "optim.max_logit_every=1"],
    "recomputed": ["model=tiny_deepseek", "run.recompute=[moe,norm]"],
    "offloaded": [
        *["model=tiny_deepseek", "run.recompute=[norm]"],
        "run.offload=[residual,attention,expert_h]",
    ],
}
EXPERTS = ["parallel.expert=2", "parallel.dispatch=alltoall"]
STAGES = ["parallel.expert=1", "parallel.pipeline=2"]
LAYOUTS = {
    "experts": EXPERTS,
    "symm": ["parallel.expert=2", "parallel.dispatch=symm"],
    "tensor": [*EXPERTS, "parallel.tensor=2"],
    "nodes": ["parallel.expert=2", "parallel.dispatch=hier"],
    "stages": STAGES,
    "chunks": [*STAGES, "parallel.virtual_pipeline=2"],
}
SECONDS = 500


def overrides(model: str, layout: list[str], recipe: str, graph: str, overlap: str) -> list[str]:
    """Overrides of a run."""
    how = [f"run.graph={graph}", f"parallel.overlap_microbatches={overlap}"]
    # Weight gradients of two micro-batches in one sum have other bits.
    how.append("parallel.delay_wgrad=on")
    return [*MODELS[model], f"precision={recipe}", *TRAINING, *layout, *how]


def _cases() -> dict[str, Case]:
    """Runs by name: with overlap and without, of every model, recipe and way to run a step."""
    cases = {}
    each: Any = ("bf16", "fp8_block"), (EAGER, CAPTURED), ("off", "on")
    runs = [
        *product(["experts"], MODELS, *each),
        *product(["symm"], ["tiny", "deepseek"], *each),
        *product(["tensor"], ["deepseek"], *each),
        *product(["nodes"], ["tiny"], *each),
        *product(["stages"], ["tiny"], *each),
        *product(["chunks"], ["tiny", "offloaded"], ["bf16"], *each[1:]),
        *product(["symm"], ["offloaded"], ["fp8_block"], [CAPTURED], ["off", "on"]),
    ]
    for layout, model, *how in runs:
        given = overrides(model, LAYOUTS[layout], *how)
        node_gpus = "1" if layout == "nodes" else ""
        cases[names((layout, model, *how))] = Case(RANKS, given, node_gpus)
    return cases


CASES = _cases()
PAIRS = [Pair(on, f"{on.removesuffix('on')}off") for on in CASES if on.endswith("-on")]
