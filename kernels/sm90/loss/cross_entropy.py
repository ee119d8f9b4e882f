"""Kernel `cross_entropy`: the loss of every row of logits, and its gradient in their place.

    loss[n] = log(sum over v of exp(x[n, v])) - x[n, target[n]]
    x[n, v] = scale * (exp(x[n, v]) / sum - (v == target[n]))

One read and one write of the logits, where statistics first and the gradient later read them twice.
The gradient of a loss is not known yet, so the caller says what it is going to be: `scale`.

A row is shared by the CTAs of a cluster, in whose shared memory it stays from its sums to its
gradient. Each has four stages for parts of rows, which come and go by bulk copies. Half of its
warps add up one row of the cluster's while the other half makes gradients of another:

    16 warps, statistics    wait until part k is there; largest logit and sum, over threads, warps
                            (shared memory), and to each CTA of the cluster (st.async)
    16 warps, gradients     wait for the statistics of row k from all CTAs; logits to gradients, in
                            place; one thread stores them, and when part k - 1 has left, loads what
                            its stage is for next

Statistics have places for eight rows. Who sends those of row k has made the gradient of row k - 4,
for which all others had sent theirs; they had then made the gradient of row k - 8.

QuACK 0.6.5 has such a kernel, in which a launched cluster has one row: nothing is on its way while
that is computed. On an H200 it moves 2.7 to 3.1 TB/s, this one 3.6; two passes move 3.9, and half
as many bytes again.

Legend: N rows, V columns, W columns of a CTA's part.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from phalanx.kernels.sm90.gemm.storage import array, struct
from phalanx.kernels.sm90.jit import ptx
from phalanx.kernels.sm90.jit.arguments import require
from phalanx.kernels.sm90.jit.launch import launch, sms

CLUSTERS = (1, 2, 4, 8)
"""CTAs that may share a row: every Hopper GPU takes eight."""
STAGES = 4
"""One is added up, one becomes a gradient, one leaves, one comes: with three it took a fifth more
time, with six 1 % less."""
PLACES = 2 * STAGES
_COLUMNS = 8
"""bf16 of a 16-byte access."""
_WIDEST = 28_800
"""Columns of a stage: as many as four of them leave room for."""
_WARPS = 16
_THREADS = 32 * _WARPS
"""Of statistics, and of gradients."""
_STATISTICS, _GRADIENTS = 1, 2
"""Their barriers."""
_ROUNDS = 8
"""Clusters launched, over those that there are SMs for: not all of these may fit on a GPU at once,
which then matters little."""
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)
_LOWEST = -1e30
"""The largest logit of no columns."""


@dataclass(frozen=True)
class CrossEntropyConfig:
    """What is compiled into a `cross_entropy` kernel."""

    cluster: int
    """CTAs that share a row, of CLUSTERS."""


def configured(columns: int) -> CrossEntropyConfig | None:
    """For so many columns the smallest cluster, as a part takes some time however short it is; None
    if the kernel does not take them: multiples of 8 up to 230,400."""
    fits = (c for c in CLUSTERS if columns % _COLUMNS == 0 and _part(columns, c) <= _WIDEST)
    cluster = next(fits, None)
    return None if cluster is None else CrossEntropyConfig(cluster)


def _part(columns: int, cluster: int) -> int:
    """W: a multiple of 8, so that the parts of the last CTAs may be narrower, or empty."""
    return -(-columns // (_COLUMNS * cluster)) * _COLUMNS


class CrossEntropyKernel:
    """The kernel of a configuration, as `cute.compile` takes it."""

    pointers: ClassVar[tuple[tuple[type, int], ...]] = (
        (Uint32, 16),  # logits [N, V], as words of two bf16
        (Int64, 8),  # target [N]
        (Float32, 4),  # loss [N]
        (Float32, 4),  # scale [1]
    )
    integers: ClassVar[int] = 4

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.cluster = config.cluster

    @cute.jit
    def __call__(
        self,
        logits: cute.Pointer,
        target: cute.Pointer,
        loss: cute.Pointer,
        scale: cute.Pointer,
        sizes: tuple[Int32, Int32, Int32, Int32],
        stream: cuda.CUstream,
    ) -> None:
        """Launch; sizes: N, V, W and clusters."""
        rows, columns, part, clusters = sizes
        self.kernel(logits, target, loss, scale, rows, columns, part, clusters).launch(
            grid=[clusters * self.cluster, 1, 1],
            block=[2 * _THREADS, 1, 1],
            cluster=[self.cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        logits: cute.Pointer,
        target: cute.Pointer,
        loss: cute.Pointer,
        scale: cute.Pointer,
        rows: Int32,
        columns: Int32,
        part: Int32,
        clusters: Int32,
    ) -> None:
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        storage = cutlass.utils.SmemAllocator().allocate(
            struct(
                full=array(Int64, STAGES),
                seen=array(Int64, PLACES),
                pairs=array(Float32, PLACES * self.cluster * 2),
                warps=array(Float32, 2 * _WARPS * 2),
                data=array(Uint32, STAGES * _WIDEST // 2, 128),
            )
        )
        if cute.arch.thread_idx()[0] == 0:
            for s in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(storage.full.data_ptr() + s, 1)
            for s in cutlass.range_constexpr(PLACES):
                cute.arch.mbarrier_init(storage.seen.data_ptr() + s, 1)
                self._expect(storage, Int32(s))
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        begin = cutlass.min(rank * part, columns)
        own = cutlass.min(part, columns - begin)
        row, number = cute.arch.block_idx()[0] // self.cluster, Int32(0)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < _WARPS:
            while row < rows:
                self._statistics(storage, number, own, rank)
                row += clusters
                number += 1
        else:
            leads = cute.arch.thread_idx()[0] == _THREADS
            source = logits.toint() + (Int64(row) * columns + begin) * 2
            step = Int64(clusters) * columns * 2
            factor = cute.make_tensor(scale, cute.make_layout(1))[0]
            if leads:
                for s in cutlass.range_constexpr(STAGES):
                    if row + s * clusters < rows:
                        self._load(storage, Int32(s), source + s * step, own)
            while row < rows:
                wanted = cute.make_tensor(target, cute.make_layout(rows))[row]
                out = cute.make_tensor(loss + row, cute.make_layout(1))
                self._gradient(storage, number, own, begin, columns, wanted, out, factor)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=_GRADIENTS, number_of_threads=_THREADS)
                if leads:
                    self._expect(storage, number % PLACES)
                    if own > 0:
                        ptx.bulk_store(source, _stage(storage, number % STAGES), own * 2)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                    if (number > 0) & (row + (STAGES - 1) * clusters < rows):
                        later = (number + STAGES - 1) % STAGES
                        self._load(storage, later, source + (STAGES - 1) * step, own)
                row += clusters
                number += 1
                source += step
            if leads:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def _expect(self, storage: Any, place: Int32) -> None:
        """One thread: a row's statistics will come to a place from all CTAs."""
        seen = storage.seen.data_ptr() + place
        cute.arch.mbarrier_arrive_and_expect_tx(seen, self.cluster * 8)

    @cute.jit
    def _load(self, storage: Any, stage: Int32, source: Int64, own: Int32) -> None:
        """One thread: bring a part to a stage."""
        full = storage.full.data_ptr() + stage
        cute.arch.mbarrier_arrive_and_expect_tx(full, own * 2)
        if own > 0:
            ptx.bulk_load(_stage(storage, stage), source, own * 2, ptx.address(full))

    @cute.jit
    def _statistics(self, storage: Any, number: Int32, own: Int32, rank: Int32) -> None:
        """Of row `number` of the cluster, to all CTAs: the largest logit, as a power of two, and
        the sum of all over it."""
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = _arrived(storage, number)
        most, total = Float32(_LOWEST), Float32(0)
        for piece in cutlass.range(thread, own // _COLUMNS, _THREADS, unroll=2):
            x = _eight(base + piece * 16)
            top = x[0]
            for i in cutlass.range_constexpr(1, _COLUMNS):
                top = cute.arch.fmax(top, x[i])
            higher = cute.arch.fmax(most, top * _LOG2_E)
            total = total * ptx.exp2(most - higher)
            for i in cutlass.range_constexpr(_COLUMNS):
                total += ptx.exp2(ptx.multiply_add(x[i], Float32(_LOG2_E), -higher))
            most = higher
        for i in cutlass.range_constexpr(5):
            most, total = _joined(most, total, 16 >> i)
        warps = cute.make_tensor(
            storage.warps.data_ptr() + number % 2 * (2 * _WARPS), cute.make_layout((2, _WARPS))
        )
        if lane == 0:
            warps[0, warp], warps[1, warp] = most, total
        cute.arch.barrier(barrier_id=_STATISTICS, number_of_threads=_THREADS)
        if warp == 0:
            most, total = warps[0, lane % _WARPS], warps[1, lane % _WARPS]
            for i in cutlass.range_constexpr(4):
                most, total = _joined(most, total, 8 >> i)
            most, total = cute.arch.shuffle_sync(most, 0), cute.arch.shuffle_sync(total, 0)
            if lane < self.cluster:
                place = number % PLACES
                pair = storage.pairs.data_ptr() + (place * self.cluster + rank) * 2
                seen = storage.seen.data_ptr() + place
                ptx.send_pair(ptx.address(pair), ptx.address(seen), lane, most, total)

    @cute.jit
    def _gradient(
        self,
        storage: Any,
        number: Int32,
        own: Int32,
        begin: Int32,
        columns: Int32,
        wanted: Int64,
        out: cute.Tensor,
        factor: Float32,
    ) -> None:
        """Of row `number` of the cluster, in place of its logits; and its loss."""
        thread, place = cute.arch.thread_idx()[0] - _THREADS, number % PLACES
        base = _arrived(storage, number)
        cute.arch.mbarrier_wait(storage.seen.data_ptr() + place, number // PLACES % 2)
        pairs = cute.make_tensor(
            storage.pairs.data_ptr() + place * (2 * self.cluster),
            cute.make_layout((2, self.cluster)),
        )
        most, total = pairs[0, 0], Float32(0)
        for r in cutlass.range_constexpr(1, self.cluster):
            most = cute.arch.fmax(most, pairs[0, r])
        for r in cutlass.range_constexpr(self.cluster):
            total += pairs[1, r] * ptx.exp2(pairs[0, r] - most)
        log_sum, hit = most + cute.math.log2(total), Int32(-1)
        if (wanted >= begin) & (wanted < begin + own):
            hit = Int32(wanted) - begin
        if (thread == 0) & ((wanted < 0) | (wanted >= columns)):
            out[0] = log_sum * _LN_2
        for piece in cutlass.range(thread, own // _COLUMNS, _THREADS, unroll=2):
            x = _eight(base + piece * 16)
            grad = cute.make_rmem_tensor(_COLUMNS, Float32)
            for i in cutlass.range_constexpr(_COLUMNS):
                grad[i] = ptx.exp2(ptx.multiply_add(x[i], Float32(_LOG2_E), -log_sum))
            if piece == hit // _COLUMNS:
                for i in cutlass.range_constexpr(_COLUMNS):
                    if hit % _COLUMNS == i:
                        grad[i] = grad[i] - 1.0
                        out[0] = ptx.multiply_add(log_sum, Float32(_LN_2), -x[i])
            words = [
                ptx.pack(grad[2 * w] * factor, grad[2 * w + 1] * factor)
                for w in range(_COLUMNS // 2)
            ]
            ptx.store_shared(base + piece * 16, *words)


def _stage(storage: Any, stage: Int32) -> Int32:
    """Where it begins."""
    return ptx.address(storage.data.data_ptr()) + stage * (2 * _WIDEST)


def _arrived(storage: Any, number: Int32) -> Int32:
    """Where the part of row `number` of the cluster is, when it is there."""
    stage = number % STAGES
    cute.arch.mbarrier_wait(storage.full.data_ptr() + stage, number // STAGES % 2)
    return _stage(storage, stage)


def _eight(where: Int32) -> list[Float32]:
    """Columns of 16 bytes of shared memory."""
    return [x for word in ptx.load_shared(where) for x in ptx.unpack(word)]


def _joined(most: Float32, total: Float32, distance: int) -> tuple[Float32, Float32]:
    """Statistics of two sets of columns, of this lane and of another."""
    other = cute.arch.shuffle_sync_bfly(most, offset=distance)
    sums = cute.arch.shuffle_sync_bfly(total, offset=distance)
    higher = cute.arch.fmax(most, other)
    return higher, total * ptx.exp2(most - higher) + sums * ptx.exp2(other - higher)


def cross_entropy_(logits_NV: Tensor, target_N: Tensor, scale: Tensor) -> Tensor:
    """The loss of each row, fp32 [N]; logits become scale * (softmax - one-hot of the target).

    Args:
        logits_NV: bf16, contiguous, V columns for which there is a kernel (`configured`).
        target_N: int64; the logit of a target that is no column counts as 0.
        scale: fp32, of one element: the gradient that every loss is going to have.

    Raises:
        ValueError: a shape, dtype, stride, alignment or device that the kernel does not take.
    """
    where, (N, V) = logits_NV.device, logits_NV.shape
    require(
        where,
        logits=(logits_NV, torch.bfloat16, None),
        target=(target_N, torch.int64, (N,)),
        scale=(scale.view(1), torch.float32, None),
    )
    config = configured(V)
    if config is None:
        most = CLUSTERS[-1] * _WIDEST
        raise ValueError(f"{V} columns: cross_entropy takes multiples of {_COLUMNS} up to {most}")
    loss_N = torch.empty(N, dtype=torch.float32, device=where)
    if N:
        clusters = min(N, _ROUNDS * sms(where) // config.cluster)
        sizes = (N, V, _part(V, config.cluster), clusters)
        launch(CrossEntropyKernel, config, (logits_NV, target_N, loss_N, scale), sizes)
    return loss_N
