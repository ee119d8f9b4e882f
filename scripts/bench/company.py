"""A copy kernel that keeps a number of SMs busy while something else is measured.

It copies between two buffers for a number of passes fixed beforehand, chosen to outlast what is
measured, and never waits for anything. One program holds an SM: the GEMMs use nearly all registers
of theirs, so that no CTA of them fits beside one.
"""

import math

import torch
import triton
import triton.language as tl

from phalanx.scripts.bench.measure import Launches

BLOCK = 8192
"""Elements of 2 bytes that a program copies at once: about the rate at which an SM feeds NVLink."""
_BYTES = 256 * 2**20
_MAX_PASSES = 400_000
_TRIAL_PASSES = 2_000


@triton.jit
def copy_blocks(source, target, blocks, passes, BLOCK: tl.constexpr):
    """Program p of P copies block (i P + p) mod `blocks` in its pass i."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    inside = tl.arange(0, BLOCK)
    for i in range(passes):
        at = (i * programs + first) % blocks * BLOCK + inside
        tl.store(target + at, tl.load(source + at))


def passes_for(ms: float, trial_ms: float) -> int:
    """Passes that take `ms` if `_TRIAL_PASSES` take `trial_ms`, within bounds.

    A multiple of 16 like the trial's, as Triton would compile the kernel anew for others.
    """
    return min(_MAX_PASSES, 16 * math.ceil(_TRIAL_PASSES * ms / trial_ms / 16))


class Copying(Launches):
    """`measure.Company`: copies on `programs` SMs from before a side begins until after its end."""

    def __init__(self, programs: int, ms: float) -> None:
        """`ms` is how long the copies must last at least."""
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
