"""Sharded parameters on two GPUs: captured as eager, and as unsharded ones.

python -m pytest -m gpu tests/extras/sharded_params/test_sharded_gpu.py
"""

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

STEPS = 8
ZERO3 = "parallel.distributed_optimizer=zero3"
ONE, TWO = (training(STEPS, batch, "optim.lr=2e-4") for batch in (4, 8))  # micro-batches of a rank
MODEL = ["model.layers=5", "model.hidden=512", "model.moe.ffn=512", "parallel.expert=1"]
# Validation before the first captured step, which is the third, and between captured ones.
MODEL += ["run.eval_interval=1", "run.eval_batches=1"]
DEEPSEEK = ["model=tiny_deepseek", *MODEL, "model.mtp_layers=1"]
GPT_OSS = ["model=tiny_gpt_oss", *MODEL, "optim.moments=bf16"]
LAYOUTS = {
    "mtp": [*ONE, *DEEPSEEK],
    "biased": [*ONE, *GPT_OSS],
    "recompute": [*ONE, *DEEPSEEK, "run.recompute=full"],
    "expert": [*ONE, *DEEPSEEK, "parallel.expert=2"],
    "fp8": [*ONE, *DEEPSEEK, "precision=fp8_block"],
    "micro_batches": [*TWO, *DEEPSEEK],
}
CASES = {}
for name, how in LAYOUTS.items():
    CASES[names((name, "whole"))] = Case(RANKS, [*how, f"run.graph={CAPTURED}"])
    for graph in (EAGER, CAPTURED):
        CASES[names((name, graph))] = Case(RANKS, [*how, ZERO3, f"run.graph={graph}"])
SECONDS = 500

SAME = ("loss", "valid_loss")
PAIRS = [Pair(names((of, CAPTURED)), names((of, EAGER)), values=SAME) for of in LAYOUTS]
# Sums of two ranks have no order, those of two micro-batches do.
PAIRS += [
    Pair(names((of, CAPTURED)), names((of, "whole")), close=of == "micro_batches", values=SAME)
    for of in LAYOUTS
]
