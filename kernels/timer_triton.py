"""Waits on the GPU's clock, in Triton: what follows on a stream starts no earlier than a moment.

A wait ends by itself and takes one warp of one SM. Both kernels can be captured in a CUDA graph,
whose replays read the clock anew.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit
def write_clock(stamp):  # type: ignore[no-untyped-def]
    tl.store(stamp, globaltimer())


@triton.jit(do_not_specialize=["nanoseconds"])
def wait_for_clock(stamp, nanoseconds):  # type: ignore[no-untyped-def]
    until = tl.load(stamp) + nanoseconds
    now = globaltimer()
    while now < until:
        now = globaltimer()
    tl.store(stamp, now)  # a loop without a result might be removed


def stamp(device: torch.device) -> Tensor:
    """The clock when the current stream comes here, in nanoseconds: int64 [1]."""
    now = torch.empty(1, dtype=torch.int64, device=device)
    write_clock[(1,)](now, num_warps=1)
    return now


def wait_after(stamp: Tensor, seconds: float) -> None:
    """Have the current stream wait until at most 2 `seconds` have passed since a `stamp`.

    It overwrites the stamp, int64 [1].
    """
    if not 0 <= seconds <= 2:
        raise ValueError(f"a wait of {seconds} s: at most 2 s fit")
    wait_for_clock[(1,)](stamp, round(seconds * 1e9), num_warps=1)
