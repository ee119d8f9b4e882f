"""Training with recomputation and offloading: same results as without, eager and captured."""

from pathlib import Path

import pytest

from tests.end_to_end.test_train_gpu import (
    GRAPH,
    _hopper,
    train,
    train_side_by_side,
    two_gpus,
)

pytestmark = pytest.mark.gpu
__all__ = ["_hopper", "two_gpus"]

PARTS = {
    "norm": ["run.recompute=norm"],
    "expert_h": ["run.recompute=expert_h"],
    "parts": ["run.recompute=[norm,attention,mlp]"],
    "moe": ["run.recompute=[moe,norm]"],
    "full": ["run.recompute=full"],
    "offload": ["run.offload=[residual,attention,expert_h]"],
    "full_offload": ["run.recompute=full", "run.offload=residual"],
    "both": ["run.recompute=[norm,attention]", "run.offload=[residual,expert_h]"],
}
MLA = {
    "mla_up": ["run.recompute=[mla_up,norm]"],
    "mla_up_attention": ["run.recompute=[mla_up,attention]", "run.offload=[residual]"],
}
NAMES = ("loss", "grad_norm", "valid_loss", "mtp_loss")
COMMON = ["run.steps=8", "run.eval_interval=4", "run.eval_batches=1", "parallel.capacity_factor=8"]


@pytest.mark.parametrize(
    ("model", "precision"),
    [(m, "bf16") for m in ("tiny", "tiny_gpt_oss", "tiny_deepseek")]
    + [("tiny_deepseek", "fp8_block")],
)
def test_no_step_changes(model: str, precision: str, tmp_path: Path) -> None:
    options = [*COMMON, f"model={model}", f"precision={precision}", "kernels=fused"]
    parts = PARTS | (MLA if model == "tiny_deepseek" else {})
    runs = {"kept": options} | {name: [*options, *p, GRAPH] for name, p in parts.items()}
    kept, *others = train_side_by_side(tmp_path, runs).values()
    for name, got in zip(parts, others, strict=True):  # of which the first steps are eager
        for key in NAMES:
            assert [s.get(key) for s in got] == [s.get(key) for s in kept], (name, key)


@pytest.mark.parametrize("sms", ["0", "16"])
@pytest.mark.parametrize("save_x", ["redispatch", "keep"])
def test_over_exchanges_inside_a_node(
    sms: str, save_x: str, tmp_path: Path, two_gpus: None
) -> None:
    options = [*COMMON, "model=tiny_deepseek", "kernels=fused", "parallel.dispatch=symm"]
    options += [f"parallel.save_x={save_x}", f"parallel.comm_sms={sms}"]
    kept = train(tmp_path, "kept", *options, ranks=2)
    for name in ("norm", "expert_h", "parts", "moe", "offload", "full"):
        graph = train(tmp_path, name, *options, *PARTS[name], GRAPH, ranks=2)
        for key in NAMES:
            assert [s.get(key) for s in graph] == [s.get(key) for s in kept], (name, key)
