"""Weight gradients that wait for a pipeline's transfers are those of the backward pass."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.training import Trained, trained

pytestmark = pytest.mark.dist

SMALL = [
    "run.steps=3",
    "data.sequence_length=16",
    "data.micro_batch=1",
    "model.vocab_size=64",
    "model.hidden=32",
    "model.dense_ffn=48",
    "model.layers=4",
    "model.moe.ffn=16",
    "model.attention.head_dim=8",
    "model.init_std=0.1",
    "optim.warmup_steps=0",
    "parallel.expert=1",
]
INTERLEAVED = {"parallel.pipeline": 2, "parallel.virtual_pipeline": 2}
DEEPSEEK = ["model=tiny_deepseek", "model.attention.kv_lora_rank=16"]
CASES: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "two stages": (2, ["model=tiny"], {"parallel.pipeline": 2}),
    "four stages": (4, ["model=tiny"], {"parallel.pipeline": 4}),
    "interleaved": (2, ["model=tiny"], INTERLEAVED),
    "data parallel": (4, ["model=tiny"], {"parallel.pipeline": 2}),
    "interleaved, data parallel": (4, ["model=tiny_gpt_oss"], INTERLEAVED),
    "expert parallel": (4, ["model=tiny"], {"parallel.pipeline": 2, "parallel.expert": 2}),
    "tied, tokens ahead": (
        2,
        ["model=tiny_deepseek", "model.tie_embeddings=true"],
        {"parallel.pipeline": 2},
    ),
    "recomputed": (
        2,
        ["model=tiny_deepseek", "run.recompute=[norm,attention,expert_h]"],
        {"parallel.pipeline": 2},
    ),
    "offloaded": (2, ["model=tiny"], INTERLEAVED | {"run.offload": ["residual", "expert_h"]}),
    "fp8": (2, ["model=tiny", "precision=fp8_block"], {"parallel.pipeline": 2}),
}


def run(case: str, delay: str, within: Any = None) -> Trained:
    world, given, changes = CASES[case]
    batch = {"data.global_batch": 6 * world // changes["parallel.pipeline"]}
    knobs = {"kernels.backend": "torch", "parallel.delay_wgrad": delay}
    return trained(world, [*given[:1], *SMALL, *given[1:]], changes | batch | knobs, within)


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_same(case: str) -> None:
    plain, delayed = run(case, "off"), run(case, "on")
    assert plain.series("loss") == delayed.series("loss")
    assert plain.series("grad_norm") == delayed.series("grad_norm")
    assert plain.left == delayed.left
    for key, value in plain.after.items():
        assert torch.equal(delayed.after[key], value), key
