"""A copy kernel that keeps a number of SMs busy while something else is measured.

It copies between two buffers for a number of passes fixed beforehand, chosen to outlast what is
measured, and never waits for anything. One program holds an SM: the GEMMs use nearly all registers
of theirs, so that no CTA of them fits beside one.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""Elements of 2 bytes that a program copies at once: about the rate at which an SM feeds NVLink."""
_BYTES = 256 * 2**20
_MAX_PASSES = 400_000
_TRIAL_PASSES = 2_000
_HEAD_START_CYCLES = 60_000
"""By which the copies are ahead; about 30 us."""


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


class Copying:
    """`measure.Company`: copies on `programs` SMs from before a side begins until after its end."""

    def __init__(self, programs: int, ms: float) -> None:
        """`ms` is how long the copies must last at least."""
        self.programs = programs
        self.source = torch.zeros(_BYTES // 2, dtype=torch.int16, device="cuda")
        self.target = torch.empty_like(self.source)
        self.stream = torch.cuda.Stream()
        self.passes, self._ends = _TRIAL_PASSES, []
        self._copy()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._copy()
        end.record()
        end.synchronize()
        self.trial_ms = begin.elapsed_time(end)
        self.passes = passes_for(ms, self.trial_ms)

    @property
    def gigabytes_per_second(self) -> float:
        return 4e-6 * BLOCK * self.programs * _TRIAL_PASSES / self.trial_ms

    def _copy(self) -> None:
        blocks = self.source.numel() // BLOCK
        copy_blocks[(self.programs,)](
            self.source, self.target, blocks, self.passes, BLOCK=BLOCK, num_warps=8
        )

    def start(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._copy()
            self._end = torch.cuda.Event(enable_timing=True)
            self._end.record()
        torch.cuda._sleep(_HEAD_START_CYCLES)

    def join(self, end: Any) -> None:
        self._ends.append((end, self._end))
        torch.cuda.current_stream().wait_event(self._end)

    def shortest_lead(self) -> float:
        return min(end.elapsed_time(later) for end, later in self._ends)
