"""Kernel `cross_entropy`: the loss of every row of logits, and its gradient written over them.

    loss[n] = log(sum over v of exp(x[n, v])) - x[n, target[n]]
    x[n, v] = scale * (exp(x[n, v]) / sum - (v == target[n]))

One read and one write of the logits, where statistics first and the gradient later read them twice.
The gradient of the loss is not known yet: the caller passes its future value, `scale`.

A row is shared by the CTAs of a cluster, in whose shared memory it stays from its sums to its
gradient. Each has four stages for parts of rows, loaded and stored by bulk copies. Half of its
warps sum one row while the other half computes gradients of another:

    16 warps, statistics    wait for part k; largest logit and sum, over threads, warps
                            (shared memory), and to each CTA of the cluster (st.async)
    16 warps, gradients     wait for the statistics of row k from all CTAs; logits to gradients, in
                            place; one thread stores them, and when part k - 1 has been read by
                            its store, loads the next part into that stage

Barriers, and the arrivals that complete a phase:

    full[stage]   4          1, of the loading thread, and the bytes of its bulk load
    seen[slot]    8          1, of the CTA's thread that computes gradients, and 8 bytes (st.async)
                             from each CTA of the cluster
    named 1, 2               512 threads: warps of statistics, warps of gradients

Statistics have slots for eight rows, twice the stages. A CTA that sends those of row k has computed
the gradient of row k - 4, for which all CTAs had sent theirs; they had then computed the gradient
of row k - 8, so its slot is free.

QuACK 0.6.5 has such a kernel, in which a launched cluster has one row: nothing is in flight while
it is computed. On an H200 it moves 2.7 to 3.1 TB/s, this one 3.6; two passes move 3.9, and half as
many bytes again.

Legend: N rows, V columns, W columns of a CTA's part.
"""

import math
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit import ptx
from phalanx.kernels.sm90.jit.launch import launch, require, sms
from phalanx.kernels.sm90.jit.pointers import Fp32Ptr, LongPtr, WordVecPtr

CLUSTERS = (1, 2, 4, 8)  # CTAs that may share a row: every Hopper GPU takes eight
STAGES = 4
"""One is summed, one becomes a gradient, one is stored, one is loaded. Three take a fifth more
time, six 1 % less."""
SLOTS = 2 * STAGES
_COLUMNS = 8  # bf16 of a 16-byte access
_WIDEST = 28_800  # columns of a stage: four of them fill shared memory
_WARPS = 16
_THREADS = 32 * _WARPS  # threads for statistics, and as many for gradients
_STATISTICS, _GRADIENTS = 1, 2  # named barriers of the two halves; 0 belongs to sync_threads
_ROUNDS = 8
"""Clusters launched per cluster that the SMs hold: several, as a GPU may hold fewer than its SMs
suggest, where GPCs differ in size."""
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)
_LOWEST = -1e30  # largest logit of an empty part; finite, so that differences are no NaN


@dataclass(frozen=True)
class CrossEntropyConfig:
    """Choices that are compiled into a `cross_entropy` kernel."""

    cluster: int  # CTAs that share a row, of CLUSTERS


def configured(columns: int) -> CrossEntropyConfig | None:
    """Smallest cluster for `columns`, as a part has a fixed cost; None if the kernel does not take
    them (multiples of 8 up to 230,400)."""
    fits = (c for c in CLUSTERS if columns % _COLUMNS == 0 and _part(columns, c) <= _WIDEST)
    cluster = next(fits, None)
    return None if cluster is None else CrossEntropyConfig(cluster)


def _part(columns: int, cluster: int) -> int:
    """W: a multiple of 8; parts of the last CTAs may be narrower, or empty."""
    return -(-columns // (_COLUMNS * cluster)) * _COLUMNS


class CrossEntropyKernel:
    """The kernel of a configuration, as `cute.compile` takes it."""

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.cluster = config.cluster

    @cute.jit
    def __call__(
        self,
        logits: WordVecPtr,
        target: LongPtr,
        loss: Fp32Ptr,
        scale: Fp32Ptr,
        rows: Int32,
        columns: Int32,
        part: Int32,
        clusters: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """logits [N, V] in words of two bf16; target, loss [N]; scale [1]; `part` is W."""
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
                seen=array(Int64, SLOTS),
                pairs=array(Float32, SLOTS * self.cluster * 2),
                warps=array(Float32, 2 * _WARPS * 2),
                data=array(Uint32, STAGES * _WIDEST // 2, 128),
            )
        )
        # One thread initialises what all threads, and other CTAs, are going to use.
        if cute.arch.thread_idx()[0] == 0:
            for s in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(storage.full.data_ptr() + s, 1)
            for s in cutlass.range_constexpr(SLOTS):
                cute.arch.mbarrier_init(storage.seen.data_ptr() + s, 1)
                self._expect_statistics(storage, Int32(s))
        # All CTAs of the cluster: their st.async may arrive at a barrier right away. The fence
        # makes the barriers visible to the cluster and to the async proxy.
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        # Parts of the last CTAs may be empty: these take part in every exchange, with sums of 0.
        begin = cutlass.min(rank * part, columns)
        width = cutlass.min(part, columns - begin)
        row, number = cute.arch.block_idx()[0] // self.cluster, Int32(0)
        # Clusters take rows in turn. The two halves go through the same rows, each at its own pace:
        # statistics run ahead by as many rows as have been loaded.
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < _WARPS:
            while row < rows:
                self._statistics(storage, number, width, rank)
                row += clusters
                number += 1
        else:
            # One thread loads and stores: bulk groups are counted for each thread.
            leads = cute.arch.thread_idx()[0] == _THREADS
            source = logits.toint() + (Int64(row) * columns + begin) * 2
            step = Int64(clusters) * columns * 2
            factor = cute.make_tensor(scale, cute.make_layout(1))[0]
            # The ring is empty: the first rows are loaded without a wait.
            if leads:
                for s in cutlass.range_constexpr(STAGES):
                    if row + s * clusters < rows:
                        self._load(storage, Int32(s), source + s * step, width)
            while row < rows:
                target_column = cute.make_tensor(target, cute.make_layout(rows))[row]
                out = cute.make_tensor(loss + row, cute.make_layout(1))
                self._gradient(storage, number, width, begin, columns, target_column, out, factor)
                # Gradients of all threads (generic proxy) before the bulk store (async proxy).
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=_GRADIENTS, number_of_threads=_THREADS)
                # Behind the barrier all threads have waited for this row's statistics, and read
                # them: the slot's next phase is armed, for those of row k + 8.
                if leads:
                    self._expect_statistics(storage, number % SLOTS)
                    if width > 0:
                        ptx.bulk_store(source, _stage(storage, number % STAGES), width * 2)
                    cute.arch.cp_async_bulk_commit_group()
                    # All groups but the newest: a store has the time of one row to read its stage.
                    # Row k - 1 has been read from its stage: that one is loaded next.
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                    if (number > 0) & (row + (STAGES - 1) * clusters < rows):
                        later = (number + STAGES - 1) % STAGES
                        self._load(storage, later, source + (STAGES - 1) * step, width)
                row += clusters
                number += 1
                source += step
            # Shared memory may not go before the last stores have read it.
            if leads:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        # No CTA ends while another one may still store to its shared memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def _expect_statistics(self, storage: Any, slot: Int32) -> None:
        seen = storage.seen.data_ptr() + slot
        cute.arch.mbarrier_arrive_and_expect_tx(seen, self.cluster * 8)

    @cute.jit
    def _load(self, storage: Any, stage: Int32, source: Int64, width: Int32) -> None:
        full = storage.full.data_ptr() + stage
        # Also for an empty part, of 0 bytes: the phase completes with this arrival alone.
        cute.arch.mbarrier_arrive_and_expect_tx(full, width * 2)
        if width > 0:
            ptx.bulk_load(_stage(storage, stage), source, width * 2, ptx.address(full))

    @cute.jit
    def _statistics(self, storage: Any, number: Int32, width: Int32, rank: Int32) -> None:
        """Send log2 of row `number`'s largest exponential, and the sum over it, to all CTAs."""
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = _wait_for_part(storage, number)
        # One pass: where the maximum grows, the sum so far is scaled to it. Powers of 2, since exp2
        # is one instruction.
        most, total = Float32(_LOWEST), Float32(0)
        for piece in cutlass.range(thread, width // _COLUMNS, _THREADS, unroll=2):
            x = _eight(base + piece * 16)
            top = x[0]
            for i in cutlass.range_constexpr(1, _COLUMNS):
                top = cute.arch.fmax(top, x[i])
            # One scaling for eight columns.
            higher = cute.arch.fmax(most, top * _LOG2_E)
            total = total * ptx.exp2(most - higher)
            for i in cutlass.range_constexpr(_COLUMNS):
                total += ptx.exp2(ptx.multiply_add(x[i], Float32(_LOG2_E), -higher))
            most = higher
        # Lanes, then warps through shared memory, then CTAs: always in the same order.
        for i in cutlass.range_constexpr(5):
            most, total = _joined(most, total, 16 >> i)
        # Two buffers in turn: behind the barrier of row k + 1 warp 0 has read those of row k, so
        # that one barrier a row is enough.
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
            # Lane r sends to CTA r, this one included: data and arrival in one instruction, without
            # a fence or a barrier of the cluster. The slot is free, as the module explains.
            if lane < self.cluster:
                slot = number % SLOTS
                pair = storage.pairs.data_ptr() + (slot * self.cluster + rank) * 2
                seen = storage.seen.data_ptr() + slot
                ptx.send_pair(ptx.address(pair), ptx.address(seen), lane, most, total)

    @cute.jit
    def _gradient(
        self,
        storage: Any,
        number: Int32,
        width: Int32,
        begin: Int32,
        columns: Int32,
        target_column: Int64,
        out: cute.Tensor,
        factor: Float32,
    ) -> None:
        thread, slot = cute.arch.thread_idx()[0] - _THREADS, number % SLOTS
        # Two waits: the bulk load is visible to those who waited for its barrier, and these warps
        # have not.
        base = _wait_for_part(storage, number)
        cute.arch.mbarrier_wait(storage.seen.data_ptr() + slot, number // SLOTS % 2)
        pairs = cute.make_tensor(
            storage.pairs.data_ptr() + slot * (2 * self.cluster),
            cute.make_layout((2, self.cluster)),
        )
        # Every thread joins the CTAs' statistics itself, in the order of ranks: all CTAs get the
        # same bits.
        most, total = pairs[0, 0], Float32(0)
        for r in cutlass.range_constexpr(1, self.cluster):
            most = cute.arch.fmax(most, pairs[0, r])
        for r in cutlass.range_constexpr(self.cluster):
            total += pairs[1, r] * ptx.exp2(pairs[0, r] - most)
        log_sum, hit = most + cute.math.log2(total), Int32(-1)
        if (target_column >= begin) & (target_column < begin + width):
            hit = Int32(target_column) - begin
        # A target in no part: every CTA writes the same loss, as if its logit were 0.
        if (thread == 0) & ((target_column < 0) | (target_column >= columns)):
            out[0] = log_sum * _LN_2
        for piece in cutlass.range(thread, width // _COLUMNS, _THREADS, unroll=2):
            x = _eight(base + piece * 16)
            grad = cute.make_rmem_tensor(_COLUMNS, Float32)
            for i in cutlass.range_constexpr(_COLUMNS):
                grad[i] = ptx.exp2(ptx.multiply_add(x[i], Float32(_LOG2_E), -log_sum))
            # One thread of one CTA has the target's column, and the logit that the loss needs.
            if piece == hit // _COLUMNS:
                # Registers have no index that is known at run time.
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
    return ptx.address(storage.data.data_ptr()) + stage * (2 * _WIDEST)


def _wait_for_part(storage: Any, number: Int32) -> Int32:
    stage = number % STAGES
    # A stage's barrier completes one phase for every fourth row.
    cute.arch.mbarrier_wait(storage.full.data_ptr() + stage, number // STAGES % 2)
    return _stage(storage, stage)


def _eight(address: Int32) -> list[Float32]:
    return [x for word in ptx.load_shared(address) for x in ptx.unpack(word)]


def _joined(most: Float32, total: Float32, distance: int) -> tuple[Float32, Float32]:
    """Joint statistics of the columns of this lane and of the one at `distance`."""
    other = cute.arch.shuffle_sync_bfly(most, offset=distance)
    sums = cute.arch.shuffle_sync_bfly(total, offset=distance)
    higher = cute.arch.fmax(most, other)
    return higher, total * ptx.exp2(most - higher) + sums * ptx.exp2(other - higher)


def cross_entropy_(logits_NV: Tensor, target_N: Tensor, scale: Tensor) -> Tensor:
    """The loss of each row, fp32 [N]; logits become scale * (softmax - one-hot of the target).

    Args:
        logits_NV: bf16, contiguous, V columns for which there is a kernel (`configured`).
        target_N: int64; the logit of a target that is no column counts as 0.
        scale: fp32, one element: the future gradient of every loss.

    Raises:
        ValueError: an argument that the kernel does not take.
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
        launch(
            CrossEntropyKernel,
            config,
            **dict(logits=logits_NV, target=target_N, loss=loss_N, scale=scale),
            **dict(rows=N, columns=V, part=_part(V, config.cluster), clusters=clusters),
        )
    return loss_N
