"""Ranks of a program that torchrun starts: one on each GPU, or all of them on one.

With PHALANX_ONE_GPU=1 all ranks share cuda:0, which takes turns between their processes. NCCL does
not serve two ranks on a GPU, so collectives are those of gloo, for tensors on either device; they
cannot be captured in a CUDA graph. The kernels of `symm` need no collective, and memory that ranks
write to each other is shared between processes as between GPUs.
"""

import os

import torch
import torch.distributed as dist

from phalanx.parallel.runtime import Runtime


def on_one_gpu() -> bool:
    """All ranks share a GPU."""
    return os.environ.get("PHALANX_ONE_GPU") == "1"


def join() -> Runtime:
    """Take this rank's GPU, and meet the others."""
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if on_one_gpu():
        # Read by torch when ranks first show each other symmetric memory.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(0)
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    return Runtime(rank, world, local, torch.device("cuda", torch.cuda.current_device()))
