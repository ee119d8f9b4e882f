"""Experts of transformers over two ranks of gloo against the same model on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers.distributed import DistributedConfig

import phalanx.adapters.transformers
from tests.adapters.hf_models import VOCABULARY, close, model
from tests.support.distributed import run_distributed

SIZES = {"separate": dict(tp_size=1, fsdp_size=2), "shared": dict(tp_size=2, fsdp_size=1)}
"""Ranks with batches of their own, and ranks that share one."""


def plan(made: Any) -> dict[str, str]:
    """All parameters of the experts by expert, and nothing else, over the ranks."""
    experts = "model.layers.*.mlp.experts"
    biased = hasattr(made.model.layers[1].mlp.experts, "down_proj_bias")
    kinds = ("", "_bias") if biased else ("",)
    names = [f"{experts}.{name}{kind}" for name in ("gate_up_proj", "down_proj") for kind in kinds]
    return dict.fromkeys(names, "grouped_gemm") | {experts: "ep_dispatch_experts"}


def own_tokens(rank: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(9 + rank))


def shared_experts(name: str, folder: str, batches: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of this rank's tokens, and whole gradients of the last layer's experts."""
    stock = model(name, "eager")
    made = type(stock).from_pretrained(
        folder,
        experts_implementation="phalanx",
        distributed_config=DistributedConfig(
            ep_size=2,
            ep_plan=plan(stock),
            ep_implementation="phalanx_symm",
            **SIZES[batches],
        ),
    )
    tokens = own_tokens(dist.get_rank() if batches == "separate" else 0)
    out = made(tokens, labels=tokens)
    out.loss.backward()
    grads = {}
    for key, parameter in made.model.layers[1].mlp.experts.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        grads[key] = parameter.grad.full_tensor()
    (group,) = phalanx.adapters.transformers.groups()
    assert not group.overflowed()
    phalanx.adapters.transformers.release()
    assert phalanx.adapters.transformers.groups() == []
    return out.logits.detach(), grads


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "batches"),
    [("gpt_oss, even", "separate"), ("deepseek_v3", "separate"), ("qwen3_moe, even", "shared")],
)
def test_two_ranks_are_one_model(name: str, batches: str, tmp_path: Path) -> None:
    whole = model(name, "eager")
    whole.save_pretrained(tmp_path)
    count = 2 if batches == "separate" else 1
    outs = [whole(own_tokens(rank), labels=own_tokens(rank)) for rank in range(count)]
    (sum(out.loss for out in outs) / count).backward()
    experts = whole.model.layers[1].mlp.experts
    results = run_distributed(shared_experts, 2, name, str(tmp_path), batches)
    for rank, (logits, grads) in enumerate(results):
        close(logits, outs[rank % count].logits)
        for key, parameter in experts.named_parameters():
            close(grads[key], parameter.grad)
