"""Ranks of a program that torchrun starts: one on each GPU, or all of them on one.

With PHALANX_ONE_GPU=1 all ranks share cuda:0, which takes turns between their processes. NCCL does
not serve two ranks on a GPU, so collectives are those of gloo, for tensors on either device; they
cannot be captured in a CUDA graph. The kernels of `symm` need no collective, and memory that ranks
write to each other is shared between processes as between GPUs.
"""

import os

import torch
import torch.distributed as dist


def on_one_gpu() -> bool:
    """All ranks share a GPU."""
    return os.environ.get("PHALANX_ONE_GPU") == "1"


def join() -> None:
    """Take this rank's GPU, and meet the others."""
    if on_one_gpu():
        # Read by torch when ranks first show each other symmetric memory.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(0)
        dist.init_process_group("gloo")
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
