"""Program of a rank: models of transformers with experts over two ranks, against one rank's model.

    torchrun --nproc-per-node 2 tests/adapters/transformers_ranks.py FOLDER

On GPUs in bf16, over `symm`, on a CPU in fp32 over gloo. Each rank has a batch of its own: logits
are those of the whole model in fp32, gradients of experts those of the mean of the losses. In bf16
the errors are compared with those of the whole model in bf16 by transformers' own experts. It
prints what was compared, and raises at the first error that is larger.
"""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.pop(0)  # this folder
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers.distributed import DistributedConfig

import phalanx.adapters.transformers
from tests.adapters.hf_models import MODELS as TINY
from tests.adapters.hf_models import VOCABULARY
from tests.adapters.test_transformers_expert_parallel import plan

ROUNDING = 1e-5
"""Largest norm of an error in fp32 over the norm: sums of a token are rounded on each rank."""
TIMES = 1.5
"""Largest error in bf16 over that of transformers' own experts."""
SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
MODELS = {
    "qwen3_moe, even": dict(moe_intermediate_size=128),
    "gpt_oss, even": dict(intermediate_size=256),
}


def tokens_of(rank: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(9 + rank)
    return torch.randint(0, VOCABULARY, (2, 128), generator=generator).to(device)


def error(got: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm."""
    return ((got.float() - exact).norm() / exact.norm()).item()


def near(got: Tensor, exact: Tensor, theirs: Tensor, what: str) -> None:
    """Compare with fp32, and the error with that of transformers' own experts in this dtype."""
    found, bound = error(got, exact), max(ROUNDING, TIMES * error(theirs, exact))
    print(f"rank {dist.get_rank()}: {what}: error {found:.1e}, at most {bound:.1e}", flush=True)
    if not found <= bound:
        raise SystemExit(f"rank {dist.get_rank()}: {what} has an error of {found:.1e}")


def outputs(model: Any, device: torch.device) -> tuple[list[Any], dict[str, Tensor]]:
    """Logits of both ranks' batches, and gradients of the experts of one layer."""
    outs = [model(tokens_of(r, device), labels=tokens_of(r, device)) for r in range(2)]
    (sum(out.loss for out in outs) / 2).backward()
    experts = model.model.layers[1].mlp.experts.named_parameters()
    return [out.logits.detach() for out in outs], {name: p.grad for name, p in experts}


def check(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    rank, (model_class, config) = dist.get_rank(), TINY[name]
    config = copy.deepcopy(config)
    for key, value in (SIZES | MODELS[name]).items():
        setattr(config, key, value)
    torch.manual_seed(0)
    whole: Any = model_class._from_config(config, dtype=dtype, experts_implementation="eager")
    if rank == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    exact, exact_grads = outputs(copy.deepcopy(whole).float().to(device), device)
    theirs, their_grads = outputs(whole.to(device), device)
    made: Any = model_class.from_pretrained(
        folder,
        dtype=dtype,
        experts_implementation="phalanx",
        distributed_config=DistributedConfig(
            ep_size=2,
            ep_plan=plan(whole),
            ep_implementation="phalanx_symm",
            tp_size=1,
            fsdp_size=2,
        ),
    )
    tokens = tokens_of(rank, device)
    out = made(tokens, labels=tokens)
    out.loss.backward()
    near(out.logits, exact[rank], theirs[rank], f"{name}: logits")
    (group,) = phalanx.adapters.transformers.groups()
    assert not group.overflowed()
    found = dict(made.model.layers[1].mlp.experts.named_parameters())
    for key, grad in exact_grads.items():
        near(found[key].grad.full_tensor(), grad, their_grads[key], f"{name}: gradient of {key}")
    transport = group.transport.name
    phalanx.adapters.transformers.release()
    if rank == 0:
        print(f"equal: {name} over {transport}", flush=True)


def main() -> None:
    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    dtype = torch.bfloat16 if cuda else torch.float32
    for number, name in enumerate(MODELS):
        check(name, Path(sys.argv[1]) / str(number), device, dtype)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
