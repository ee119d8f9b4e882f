"""A copy kernel that keeps a number of SMs busy while another kernel is timed.

It copies between two buffers for a fixed number of passes, chosen to outlast the timed kernel, and
never waits. One program occupies an SM: a GEMM's CTA uses nearly all registers of an SM, so none
fits next to it.
"""

import math

import torch
import triton
import triton.language as tl

from phalanx.scripts.bench.measure import Launches

BLOCK = 8192
"""2-byte elements per program and pass: about the rate at which an SM feeds NVLink."""
_BYTES = 256 * 2**20
_MAX_PASSES = 400_000
_TRIAL_PASSES = 2_000


@triton.jit
def copy_blocks(source, target, blocks, passes, BLOCK: tl.constexpr):
    """Program p of P copies block (i P + p) mod `blocks` in pass i."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    inside = tl.arange(0, BLOCK)
    for i in range(passes):
        offsets = (i * programs + first) % blocks * BLOCK + inside
        tl.store(target + offsets, tl.load(source + offsets))


def passes_for(ms: float, trial_ms: float) -> int:
    """Passes that take `ms` if `_TRIAL_PASSES` take `trial_ms`, within bounds.

    A multiple of 16, like the trial's: Triton specializes on that and would recompile otherwise.
    """
    return min(_MAX_PASSES, 16 * math.ceil(_TRIAL_PASSES * ms / trial_ms / 16))


class Copying(Launches):
    """`measure.BackgroundLoad`: copies on `programs` SMs for at least `ms` milliseconds."""

    def __init__(self, programs: int, ms: float) -> None:
        """Size the copies by a trial launch; `ms` is their least duration."""
        super().__init__()
        self.programs, self.passes = programs, _TRIAL_PASSES
        self.source = torch.zeros(_BYTES // 2, dtype=torch.int16, device="cuda")
        self.target = torch.empty_like(self.source)
        self._stream.wait_stream(torch.cuda.current_stream())
        trial_ms = self.trial()
        self.gigabytes_per_second = 4e-6 * BLOCK * programs * _TRIAL_PASSES / trial_ms
        self.passes = passes_for(ms, trial_ms)

    def launch(self) -> None:
        blocks = self.source.numel() // BLOCK
        copy_blocks[(self.programs,)](
            self.source, self.target, blocks, self.passes, BLOCK=BLOCK, num_warps=8
        )
