"""The line on the speed of FP8: measured ratios, and the override that is faster."""

import re

import pytest

from phalanx.configs.load import load
from phalanx.configs.tables.machines import MACHINES
from phalanx.moe.plan.remedies import fp8_gain

COMMON = [
    *["run=bench", "run.device=cuda", "kernels=fused", "kernels.attention=fa4"],
    *["optim.moments=bf16", "parallel.grad_dtype=bf16", "precision=fp8_block"],
]
ONE = ["parallel.expert=1", "data.sequence_length=4096", "data.global_batch=8"]
SMALL = [
    *["model=tiny", "model.layers=12", "model.hidden=1024", "model.attention.heads=16"],
    *["model.attention.kv_heads=4", "model.attention.head_dim=64", "model.moe.experts=64"],
    *["model.moe.ffn=512", "model.moe.top_k=6", "data.sequence_length=2048"],
    *["data.micro_batch=8", "data.global_batch=32", "parallel.expert=2", "parallel.dispatch=symm"],
    "precision.dispatch=bf16",  # as when it was measured
]


@pytest.mark.parametrize(
    ("command", "ranks", "machine", "measured"),
    [  # docs/measured/training/fp8_slices_one_h200.md; a model of small experts on two H100s
        (
            ["model=moonlight_16b_a3b", "model.layers=9", "data.micro_batch=2", *ONE],
            1,
            "h200",
            1.15,
        ),
        (["model=gpt_oss_20b", "model.layers=8", "data.micro_batch=2", *ONE], 1, "h200", 1.164),
        (["model=qwen3_30b_a3b", "model.layers=10", "data.micro_batch=2", *ONE], 1, "h200", 1.111),
        (SMALL, 2, "h100", 0.939),
    ],
)
def test_the_estimate_is_near_what_was_measured(
    command: list[str], ranks: int, machine: str, measured: float
) -> None:
    line = fp8_gain(load([*COMMON, *command]), ranks, MACHINES[machine])
    assert line is not None
    assert float(line.backend.removesuffix(" x")) == pytest.approx(measured, rel=0.03)


def test_small_experts_are_advised_to_send_rows_in_fp8() -> None:
    for transport in ("symm", "auto"):
        named = [*COMMON, *SMALL, f"parallel.dispatch={transport}"]
        line = fp8_gain(load(named), 2, MACHINES["h100"])
        assert line is not None
        assert re.search(r"; precision\.dispatch=fp8 would be 1\.\d\d times as fast$", line.reason)


def test_bf16_is_advised_where_rows_in_fp8_do_not_help() -> None:
    small = [*SMALL, "parallel.expert=1", "parallel.dispatch=auto", "model.moe.ffn=128"]
    line = fp8_gain(load([*COMMON, *small]), 2, MACHINES["h100"])
    assert line is not None and "; precision=bf16 would be" in line.reason


@pytest.mark.parametrize("override", ["precision=bf16", "kernels=torch"])
def test_no_line_where_nothing_multiplies_fp8(override: str) -> None:
    assert fp8_gain(load([*COMMON, *SMALL, override]), 2, MACHINES["h100"]) is None
