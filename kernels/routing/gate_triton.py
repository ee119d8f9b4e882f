"""The gradient of router logits as two bf16 numbers, and its sum over tokens, in Triton.

Legend: T tokens, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.elementwise.part_sum_triton import part_sum

_ELEMENTS = 2048  # logits that a program reads at a time
_TURNS = 4  # blocks of tokens per program


@triton.jit
def router_gradient_split(  # type: ignore[no-untyped-def]
    grad,
    both,
    parts,
    T,
    E,
    SUMMED: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    e = tl.arange(0, EXPERTS)
    sums = tl.zeros([ROWS, EXPERTS], tl.float32)
    for turn in range(TURNS):
        t = (tl.program_id(0).to(tl.int64) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        here = (t < T)[:, None] & (e < E)[None, :]
        x = tl.load(grad + t[:, None] * E + e[None, :], mask=here, other=0.0)
        high = x.to(tl.bfloat16)
        rest = (x - high.to(tl.float32)).to(tl.bfloat16)
        to = both + t[:, None] * (2 * E) + e[None, :]
        tl.store(to, high, mask=here)
        tl.store(to + E, rest, mask=here)
        if SUMMED:
            sums += x
    if SUMMED:
        tl.store(parts + tl.program_id(0) * E + e, tl.sum(sums, 0), mask=e < E)


def split(grad_TE: Tensor, summed: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Nearest bf16 numbers and the bf16 rest, side by side; the sum over tokens.

    Args:
        grad_TE: fp32, contiguous.
        summed: dtype of the sum; None: no sum.

    Returns:
        [T, 2 E] in bf16, and [E].
    """
    T, E = grad_TE.shape
    both = grad_TE.new_empty(T, 2 * E, dtype=torch.bfloat16)
    experts = triton.next_power_of_2(E)
    rows = max(1, _ELEMENTS // experts)
    programs = triton.cdiv(T, rows * _TURNS)
    parts = None if summed is None else grad_TE.new_empty(programs, E)
    if T:
        router_gradient_split[(programs,)](
            grad_TE,
            both,
            parts,
            *(T, E),
            SUMMED=parts is not None,
            TURNS=_TURNS,
            ROWS=rows,
            EXPERTS=experts,
        )
    return both, None if parts is None else part_sum(parts, summed)
