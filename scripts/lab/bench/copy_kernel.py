"""A copy kernel that keeps a number of SMs busy while another kernel is timed.

It copies for a fixed number of passes, chosen to outlast the timed kernel. One program occupies an
SM: a GEMM's CTA uses nearly all registers of one, so none fits next to it.
"""

import triton
import triton.language as tl

BLOCK = 8192  # 2-byte elements per program and pass: about the rate at which an SM feeds NVLink


@triton.jit
def copy_blocks(  # type: ignore[no-untyped-def]
    source, target, blocks, passes, BLOCK: tl.constexpr
):
    """Program p of P copies block (i P + p) mod `blocks` in pass i."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    inside = tl.arange(0, BLOCK)
    for i in range(passes):
        offsets = (i * programs + first) % blocks * BLOCK + inside
        tl.store(target + offsets, tl.load(source + offsets))
