"""Waits of a GEMM for rows, or for weights, that other GPUs are still writing, by waves.

Rows come in waves of local experts (`push`): a row is in the wave of the first expert that reads
it. Before the first tile of a wave, the loading warps of a kernel that `waits` look for that
wave of every rank. Experts are taken in order, so later waves arrive while earlier ones are
multiplied. Borrowed weights come in waves too (`extras.replication.kernels.weights_triton`).

Roles. Each loading warp looks for itself, once a wave; multiplying warps only wait for its loads:

    lane r < R    acquire the flag of rank r for this wave until it has reached the epoch
    all lanes     fence from the generic to the async proxy, sync_warp; then load rows of the wave

The stream has waited for the side data of the same exchange before (`push.wait_peers`), which left
its epoch in `SEEN`: the wait is for that one, in a replayed CUDA graph too.

Legend: R ranks.
"""

from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from phalanx.kernels.sm90.exchange import peer
from phalanx.kernels.sm90.exchange.waves import wave_of

WORDS = 6
"""int64 words: addresses of this rank's flags of the first wave, of the awaited epoch and of the
report; milliseconds after which a wait times out; R, and the stride in int32 from a wave's
flags to the next's; this rank's experts and their waves."""
_HALF = 16  # bits of the lower one of two sizes that share a word


def ready_words(
    flags: int,
    epoch: int,
    report: int,
    *,
    limit_ms: int,
    ranks: int,
    wave_stride: int,
    experts: int,
    waves: int,
) -> Tensor:
    """The words, on the host; arguments are described at WORDS.

    Raises:
        ValueError: no expert, or more ranks than a warp has lanes.
    """
    if not 1 <= ranks <= 32 or experts < 1:
        raise ValueError(f"{ranks} ranks, {experts} experts: must be 1 to 32, and 1 or more")
    sizes = (ranks + (wave_stride << _HALF), experts + (waves << _HALF))
    return torch.tensor([flags, epoch, report, limit_ms, *sizes])


class WaveWait:
    """Device side, for each of the loading warps.

    Args:
        pointer: address of the words.
        seen: int32 of this warp in shared memory (no register is to spare): waves that have
            arrived.
    """

    def __init__(self, pointer: cute.Pointer, seen: cute.Pointer) -> None:
        self.words: Any = cute.make_tensor(pointer, cute.make_layout(WORDS))
        self.seen: Any = cute.make_tensor(seen, cute.make_layout(1))

    @cute.jit
    def reset(self) -> None:
        """Initialise: no wave has arrived."""
        self.seen[0] = Int32(0)
        cute.arch.sync_warp()

    @cute.jit
    def __call__(self, expert: Int32) -> None:
        """Wait for the wave of `expert`."""
        words, seen = self.words, self.seen
        # Loaded each time, as no register is to spare for them.
        experts = Int32(words[5])
        wave = wave_of(expert, experts & ((1 << _HALF) - 1), experts >> _HALF)
        # Waves come in the order of experts, as tiles do: most tiles find theirs seen.
        if wave >= seen[0]:
            sizes, lane = Int32(words[4]), cute.arch.lane_idx()
            if lane < (sizes & ((1 << _HALF) - 1)):
                flag = words[0] + 4 * Int64(wave * (sizes >> _HALF) + lane)
                # Written by an earlier kernel of the stream: what the flags must have reached.
                epoch = peer.load_acquire(words[1])
                peer.wait(flag, epoch, Int32(words[3]), words[2], lane)
            # Acquired in the generic proxy; TMA loads borrowed weights through the async one.
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()  # all lanes: each has waited for one rank
            seen[0] = wave + 1  # all lanes store the same number
            cute.arch.sync_warp()
