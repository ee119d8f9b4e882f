"""Routing plan on the device: the received rows of each expert of a rank, in expert order.

`plan` computes it from the routing of all received rows, with the two kernels of `place`;
`plan_backward` maps the gradient of the rows' probabilities back to the pairs. Bitwise the same as
`kernels.routing.plan.make_plan` with any other backend.

Legend: N rows received, K experts per token, L local experts, S expert rows (static).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.limits import PLAN_CAPACITIES as CAPACITIES
from phalanx.kernels.limits import PLAN_EXPERTS as MAX_EXPERTS
from phalanx.kernels.limits import PLAN_SLOTS as MAX_SLOTS
from phalanx.kernels.sm90.jit.launch import check, launch, sms
from phalanx.kernels.sm90.jit.pointers import Fp32Ptr, IntPtr
from phalanx.kernels.sm90.routing.place import MAX_PAIRS, WARPS, PlanConfig, PlanKernel

MAX_ROWS = 1 << 30  # sums of rows stay far below 2^31
_BATCH = 4  # pairs of a thread of `GatherKernel`


class Chunks(NamedTuple):
    """Distribution of the pairs: over CTAs, with `span` successive pairs for each warp."""

    blocks: int
    span: int


def chunks(pairs: int, experts: int, sms: int) -> Chunks:
    """Chunks for a GPU of `sms` SMs, at least one, with a multiple of 32 pairs for every warp. A
    CTA spends about 5 cycles on a pair and 1/16 on each count of all chunks, which it reads to find
    the rows of its pairs: the fastest number of chunks balances the two."""
    # c CTAs take 5 * pairs / c + c * experts / 16 cycles: least at the square root.
    wanted = min(max(1, math.isqrt(80 * pairs // experts)), sms)
    # Whole steps of a warp, so that each pair is in the chunk that its number gives.
    span = 32 * max(1, -(-pairs // (32 * WARPS * wanted)))
    # Fewer CTAs than wanted where spans were rounded up: an empty chunk would be read by all.
    return Chunks(max(1, -(-pairs // (WARPS * span))), span)


@dataclass(frozen=True)
class GatherConfig:
    """Choices that are compiled into a `GatherKernel`."""

    threads: int = 256


class GatherKernel:
    """out[p] = values[index[p]], or 0 where the index is negative. A thread has `_BATCH` pairs, as
    many apart as a CTA has threads: accesses of a warp are contiguous. Threads share nothing, so
    there is no barrier."""

    def __init__(self, config: GatherConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        values: Fp32Ptr,
        index: IntPtr,
        out: Fp32Ptr,
        rows: Int32,
        pairs: Int32,
        stream: cuda.CUstream,
    ) -> None:
        block = self.config.threads * _BATCH
        self.kernel(
            cute.make_tensor(values, cute.make_layout(rows)),
            cute.make_tensor(index, cute.make_layout(pairs)),
            cute.make_tensor(out, cute.make_layout(pairs)),
        ).launch(
            grid=[(pairs + (block - 1)) // block, 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, values: cute.Tensor, index: cute.Tensor, out: cute.Tensor) -> None:
        threads = self.config.threads
        first = cute.arch.block_idx()[0] * (threads * _BATCH) + cute.arch.thread_idx()[0]
        row = cute.make_rmem_tensor(_BATCH, Int32)
        value = cute.make_rmem_tensor(_BATCH, Float32)
        # Three loops, so that all loads of one kind are in flight before the first is used.
        for j in cutlass.range_constexpr(_BATCH):
            row[j] = Int32(-1)
            if first + j * threads < cute.size(index):
                row[j] = index[first + j * threads]
        for j in cutlass.range_constexpr(_BATCH):
            # A pair without a row: its probability has no gradient.
            value[j] = Float32(0)
            if row[j] >= 0:
                value[j] = values[row[j]]
        for j in cutlass.range_constexpr(_BATCH):
            if first + j * threads < cute.size(index):
                out[first + j * threads] = value[j]


def plan(
    topk_idx_NK: Tensor,
    topk_prob_NK: Tensor,
    *,
    first_expert: int,
    local_experts: int,
    rows: int,
) -> ExpertPlan:
    """Sort the pairs of this rank's experts, as `kernels.routing.plan.make_plan` does.

    Args:
        topk_idx_NK: int32 global expert ids; an id outside this rank's range (-1, say) has no row.
        topk_prob_NK: fp32 probabilities.
        first_expert: global id of local expert 0.
        local_experts: L.
        rows: S. If `needed` is larger, the last experts lack rows, and the step has to be repeated.

    Raises:
        ValueError: an argument that the kernel does not take.
    """
    where = topk_idx_NK.device
    if topk_idx_NK.ndim != 2 or not 1 <= topk_idx_NK.shape[1] <= MAX_SLOTS:
        raise ValueError(
            f"topk_idx must be [rows, top_k] with top_k of 1 to {MAX_SLOTS}, "
            f"not {list(topk_idx_NK.shape)}"
        )
    check(where, "topk_idx", topk_idx_NK, torch.int32, None)
    check(where, "topk_prob", topk_prob_NK, torch.float32, tuple(topk_idx_NK.shape))
    pairs, K = topk_idx_NK.numel(), topk_idx_NK.shape[1]
    if pairs > MAX_PAIRS:
        raise ValueError(f"topk_idx has {pairs} entries: at most {MAX_PAIRS}")
    if not 1 <= local_experts <= MAX_EXPERTS:
        raise ValueError(f"local_experts={local_experts}: must be 1 to {MAX_EXPERTS}")
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows={rows}: must be 1 to {MAX_ROWS}")
    if not -(1 << 31) <= first_expert < 1 << 31:
        raise ValueError(f"first_expert={first_expert}: must be an int32")
    # Sizes follow from shapes alone, so that the launch can be captured in a CUDA graph.
    blocks, span = chunks(pairs, local_experts, sms(where))
    out = (
        topk_idx_NK.new_empty(rows),
        topk_prob_NK.new_empty(rows),
        topk_idx_NK.new_empty(local_experts + 1),
        torch.empty_like(topk_idx_NK),
        topk_idx_NK.new_empty(()),
        topk_idx_NK.new_empty(local_experts),
    )
    # Scratch; L + 3 is at least L rounded up to a multiple of 4.
    counts = topk_idx_NK.new_empty(blocks * (local_experts + 3))
    # The smallest capacity: shared memory grows with it, for a count of every warp and expert.
    config = PlanConfig(next(c for c in CAPACITIES if c >= local_experts))
    names = "row_index", "row_prob", "offsets", "inverse", "needed", "order"
    launch(
        PlanKernel,
        config,
        **dict(idx=topk_idx_NK, prob=topk_prob_NK, counts=counts),
        **dict(zip(names, out, strict=True)),
        **dict(P=pairs, K=K, first=first_expert, L=local_experts, S=rows),
        **dict(blocks=blocks, span=span),
    )
    return ExpertPlan(*out)


def plan_backward(dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
    """Gradient of the pairs from that of `row_prob_S`: dprob_S[inverse], 0 for a pair without row.

    dprob_S is fp32, inverse_NK int32 below S; rows that the latter does not name are not read.

    Raises:
        ValueError: an argument that the kernel does not take.
    """
    check(inverse_NK.device, "inverse", inverse_NK, torch.int32, None)
    check(inverse_NK.device, "dprob", dprob_S, torch.float32, (dprob_S.numel(),))
    out = torch.empty_like(inverse_NK, dtype=torch.float32)
    if out.numel():
        tensors = dict(values=dprob_S, index=inverse_NK, out=out)
        launch(GatherKernel, GatherConfig(), **tensors, rows=dprob_S.numel(), pairs=out.numel())
    return out
