"""Kernel `topk`: the K best experts of every token, best first, and their routing probabilities.

The router's choice and weights in one pass over the logits, one warp a token. Each lane holds up to
16 logits as keys, integers of the same order. Few logits reach the K-th largest of the lanes' best
ones: these candidates are collected, and each counts those better than itself. Ties go to the lower
expert. A token with more than 32 candidates takes K rounds of a warp maximum instead. With
group-limited routing, `kernels.sm90.routing.logits` excludes experts before.

Roles. 8 warps of a CTA, a token each; they share no data, so there is no barrier but `sync_warp`:

    each warp   logits to registers, 4 a vector, up to 4 vectors a lane; scores to keys
                group-limited: best two keys of each vector to shared memory, groups ranked by lanes
                threshold = K-th largest of the lanes' largest keys (K warp maxima)
                candidates >= threshold to shared memory, 32 slots a warp
                <= 32 of them: lane l ranks candidate l by comparing it with all
                otherwise: K times the warp's maximum, lowest expert first
                lanes with rank < K: weight of their expert (warp sums), store at [token, rank]

Legend: T tokens, E experts, K experts per token.
"""

import math
from struct import pack, unpack
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from torch import Tensor

from phalanx.kernels.limits import impossible_groups
from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit.launch import check, launch
from phalanx.kernels.sm90.jit.pointers import Fp32Ptr, Fp32VecPtr, IntPtr, WordVecPtr
from phalanx.kernels.sm90.routing.logits import (
    ALL_BITS,
    FOUR,
    LANES,
    MAX_EXPERTS,
    MAX_SLOTS,
    TINY,
    WARPS,
    ExpertGroups,
    Logits,
    TopkConfig,
    as_float,
    bits_of,
    keep_best_groups,
    key_of,
    larger,
    pair,
    sigmoid,
    store_one,
    sum_exp,
    warp_sum,
)
from phalanx.kernels.sm90.routing.topk_gradient import TopkGradientKernel


class TopkKernel:
    """The kernel of a configuration, as `cute.compile` takes it."""

    def __init__(self, config: TopkConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        logits: WordVecPtr,
        bias: Fp32VecPtr,
        idx: IntPtr,
        prob: Fp32Ptr,
        T: Int32,
        E: Int32,
        scale: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """logits [T, E] in words; bias [E], if any; idx, prob [T, K]; `scale`: bits of an fp32."""
        self.kernel(logits, bias, idx, prob, T, E, scale).launch(
            grid=[(T + (WARPS - 1)) // WARPS, 1, 1],
            block=[WARPS * LANES, 1, 1],
            # Logits and keys of a lane stay in registers, whatever that leaves for other CTAs.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        logits: cute.Pointer,
        bias: cute.Pointer,
        idx: cute.Pointer,
        prob: cute.Pointer,
        T: Int32,
        E: Int32,
        scale: Int32,
    ) -> None:
        config = self.config
        memory = cutlass.utils.SmemAllocator().allocate(shared_memory(config))
        # Tells the compiler that all lanes have the same token.
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # 32 slots of each warp, which no other warp touches.
        all_found = memory.found.get_tensor(cute.make_layout((LANES, WARPS)))
        found = all_found[None, warp]
        token = cute.arch.block_idx()[0] * WARPS + warp
        # A whole warp has a token or none, so that all lanes meet at every vote and shuffle.
        if token < T:
            row = Logits.of(config, logits, token, E)
            x = row.load(Float32(0))
            keys = self._keys(row, x, bias)
            if cutlass.const_expr(config.groups is not None):
                shape = cute.make_layout((LANES * config.vectors, WARPS))
                keep_best_groups(
                    config.groups, row, keys, memory.best.get_tensor(shape)[None, warp]
                )
            top, candidates = self._gather(row, keys, found)
            # MAX_SLOTS is behind every rank that is stored, as K is at most that.
            mine, rank = Uint64(0), Int32(MAX_SLOTS)
            # More are rare: many equal logits, or large ones that crowd in few lanes.
            if candidates <= LANES:
                mine, rank = self._count(found, candidates)
            else:
                mine, rank = self._search(row, keys)
            # `logits.pair` holds the complement of the expert in its low word.
            expert = Int32(Uint32(ALL_BITS) - Uint32(mine))
            # Exact: a key and the bits of its number are each other's inverse, up to the sign of 0.
            value = as_float(bits_of(Uint32(mine >> 32)))
            chosen = rank < config.top_k
            # The key is that of a score here, with bias or a group's limit; weights are of logits.
            if cutlass.const_expr(config.by_score):
                if chosen:
                    value = row.one(expert)
            # All lanes take part, since the weights' sum is over the warp.
            p = self._weigh(row, x, value, chosen, top) * as_float(Uint32(scale))
            if chosen:
                # Lanes store where their rank says: no sort, and no exchange between lanes.
                at = Int64(token) * config.top_k + rank
                store_one(idx + at, expert)
                store_one(prob + at, p)

    @cute.jit
    def _keys(self, row: Logits, x: cute.Tensor, bias: cute.Pointer) -> cute.Tensor:
        keys = cute.make_rmem_tensor((FOUR, self.config.vectors), Uint32)
        keys.fill(0)  # below the key of every number, even of -inf
        for v in cutlass.range_constexpr(self.config.vectors):
            if row.expert(v) < row.experts:
                score = x[None, v]
                if cutlass.const_expr(self.config.biased):
                    source = cute.make_tensor(bias + row.expert(v), cute.make_layout(FOUR))
                    score = shifted_sigmoids(score, source)
                elif cutlass.const_expr(self.config.by_score):
                    score = sigmoids(score)
                for i in cutlass.range_constexpr(FOUR):
                    keys[i, v] = key_of(score[i])
        return keys

    @cute.jit
    def _gather(self, row: Logits, keys: cute.Tensor, found: cute.Tensor) -> tuple[Uint32, Int32]:
        """The largest key, and the number of candidates, of which up to 32 go to `found`. At least
        K keys reach the K-th largest of the lanes' best. The rest of `found` is 0."""
        found[cute.arch.lane_idx()] = Uint64(0)
        cute.arch.sync_warp()  # zeros of all lanes before any lane's candidates
        # A bound: K lanes hold a key at or above the K-th largest of the lanes' best. Each round
        # takes the maximum out; lanes with equal ones leave together, which only lowers it.
        best = _largest(keys)
        top, least = best, best
        for k in cutlass.range_constexpr(self.config.top_k):
            least = cute.arch.warp_redux_sync(best, "max")
            # Only lanes that had the maximum lose it; their other keys need no round, as a bound is
            # enough.
            best = Uint32(cutlass.select_(best == least, Uint32(0), best))
            if cutlass.const_expr(k == 0):
                top = least
        # 0 if fewer than K lanes had different keys: experts that do not exist stay out.
        least = larger(least, Uint32(1))
        number = Int32(0)
        for v in cutlass.range_constexpr(self.config.vectors):
            for i in cutlass.range_constexpr(FOUR):
                # Every lane with a candidate finds its place by the lanes below it: no atomics, and
                # the same places in every run.
                reaches = keys[i, v] >= least
                lanes = cute.arch.vote_ballot_sync(reaches)
                at = number + Int32(cute.arch.popc(Uint32(lanes) & cute.arch.lanemask_lt()))
                # More than 32 are counted, but not kept: `_search` takes over.
                if reaches and at < LANES:
                    found[at] = pair(keys[i, v], row.expert(v) + i)
                number += Int32(cute.arch.popc(lanes))
        cute.arch.sync_warp()  # candidates of all lanes before any lane ranks its own
        return top, number

    @cute.jit
    def _count(self, found: cute.Tensor, candidates: Int32) -> tuple[Uint64, Int32]:
        """Candidate l and its rank, in lane l."""
        lane, rank = cute.arch.lane_idx(), Int32(0)
        mine = found[lane]
        # Pairs are distinct, as experts are: ranks are, too. All lanes read one address at a time,
        # which shared memory broadcasts; past the candidates are zeros, which exceed nothing.
        for first in cutlass.range(0, candidates, FOUR, unroll=1):
            for j in cutlass.range_constexpr(FOUR):
                if found[first + j] > mine:
                    rank += 1
        if lane >= candidates:
            rank = Int32(MAX_SLOTS)
        return mine, rank

    @cute.jit
    def _search(self, row: Logits, keys: cute.Tensor) -> tuple[Uint64, Int32]:
        """The k-th best of any number of candidates, in lane k < K."""
        lane, mine = cute.arch.lane_idx(), Uint64(0)
        # Two reductions a round, of the key and then of the expert: a warp reduces 32 bits at once.
        for k in cutlass.range(self.config.top_k, unroll=1):
            best = cute.arch.warp_redux_sync(_largest(keys), "max")
            expert = Int32(MAX_EXPERTS)
            for v in cutlass.range_constexpr(self.config.vectors):
                for i in cutlass.range_constexpr(FOUR):
                    same = keys[i, v] == best
                    at = cutlass.select_(same, row.expert(v) + i, Int32(MAX_EXPERTS))
                    expert = Int32(cutlass.min(expert, at))
            # The lowest of equal keys, as pairs of key and expert are ordered in `_count`.
            expert = cute.arch.warp_redux_sync(expert, "min")
            for v in cutlass.range_constexpr(self.config.vectors):
                for i in cutlass.range_constexpr(FOUR):
                    # Out of the next rounds: 0 is below every key.
                    taken = row.expert(v) + i == expert
                    keys[i, v] = cutlass.select_(taken, Uint32(0), keys[i, v])
            # As in `_count`, each rank in a lane of its own, which stores it.
            if lane == k:
                mine = pair(best, expert)
        return mine, lane

    @cute.jit
    def _weigh(
        self, row: Logits, x: cute.Tensor, value: Float32, chosen: cutlass.Boolean, top: Uint32
    ) -> Float32:
        weights = self.config.weights
        part = Float32(0)
        if cutlass.const_expr(weights == "sigmoid" or weights == "sigmoid_sum"):
            if chosen:
                part = sigmoid(value)
            if cutlass.const_expr(weights == "sigmoid_sum"):
                part = part / (warp_sum(part) + Float32(TINY))
        else:
            # Less the largest, so that no exponential overflows; the quotient is the same.
            largest = as_float(bits_of(top))
            if chosen:
                part = cute.math.exp(value - largest)
            # Lanes that have no chosen expert add 0.
            total = part
            if cutlass.const_expr(weights == "softmax_all"):
                # Over all logits, which are still in registers.
                total = sum_exp(row, x, largest)
            part = part / warp_sum(total)
        return part


def shared_memory(config: TopkConfig) -> Any:
    """Shared memory of a CTA: candidates of each token, and the two best keys of each vector."""
    fields = dict(found=array(Uint64, WARPS * LANES))
    if config.groups is not None:
        fields["best"] = array(Uint64, WARPS * LANES * config.vectors)
    return struct(**fields)


def shifted_sigmoids(x: cute.Tensor, bias: cute.Tensor) -> cute.Tensor:
    """sigmoid(x) + bias of four logits. Exponentials first, as the compiler branches to divide."""
    shift = cute.make_rmem_tensor(FOUR, Float32)
    cute.autovec_copy(bias, shift)
    parts = [Float32(1) + cute.math.exp(-x[i]) for i in range(FOUR)]
    for i in range(FOUR):
        shift[i] = Float32(1) / parts[i] + shift[i]
    return shift


def sigmoids(x: cute.Tensor) -> cute.Tensor:
    """sigmoid(x) of four logits, as `shifted_sigmoids`."""
    scores = cute.make_rmem_tensor(FOUR, Float32)
    parts = [Float32(1) + cute.math.exp(-x[i]) for i in range(FOUR)]
    for i in range(FOUR):
        scores[i] = Float32(1) / parts[i]
    return scores


def _largest(keys: cute.Tensor) -> Uint32:
    best = keys[0]
    for i in range(1, cute.size(keys)):
        best = larger(best, keys[i])
    return best


def topk(
    logits_TE: Tensor,
    *,
    top_k: int,
    score: str,
    normalize: bool,
    softmax_over: str,
    scale: float,
    bias_E: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
) -> tuple[Tensor, Tensor]:
    """Experts of every token and their weights, as defined by `kernels.routing.topk_scores`.

    Args:
        logits_TE: fp32 or bf16; E a multiple of 8, up to 512.
        top_k: K, 1 to 16 and at most E.
        score: `softmax` or `sigmoid`.
        normalize: divide the weights by their sum; not if K is 1.
        softmax_over: `all` logits, or the chosen ones (`topk`), which equals normalising.
        scale: factor of the weights.
        bias_E: fp32, with `sigmoid` only: the choice is by sigmoid plus bias, the weights are not.
        groups: number of groups of experts, up to 32, and how many a token chooses from; with fewer
            than all, `sigmoid` only, a multiple of 4 experts in a group, and K less than three
            times as many.

    Returns:
        idx_TK int32, best first, ties to the lower expert, and prob_TK fp32.

    Raises:
        ValueError: an argument that the kernel does not take.
    """
    biased = bias_E is not None
    config = _config(logits_TE, top_k, score, normalize, softmax_over, biased, groups)
    where, (T, E), factor = logits_TE.device, logits_TE.shape, _bits(scale)
    check(where, "logits", logits_TE, logits_TE.dtype, None)
    check(where, "bias", bias_E, torch.float32, (E,))
    idx_TK = torch.empty(T, top_k, dtype=torch.int32, device=where)
    prob_TK = torch.empty(T, top_k, dtype=torch.float32, device=where)
    if T:
        tensors = dict(logits=logits_TE, bias=bias_E, idx=idx_TK, prob=prob_TK)
        launch(TopkKernel, config, **tensors, T=T, E=E, scale=factor)
    return idx_TK, prob_TK


def topk_backward(
    dprob_TK: Tensor,
    idx_TK: Tensor,
    prob_TK: Tensor,
    logits_TE: Tensor,
    *,
    score: str,
    normalize: bool,
    softmax_over: str,
    scale: float,
) -> Tensor:
    """Gradient of the logits, in their dtype, from that of the probabilities; the choice has none.

    dprob_TK and prob_TK are fp32, idx_TK int32, the latter two from `topk`; logits and options are
    those of `topk`, scale not 0.

    Raises:
        ValueError: an argument that the kernel does not take.
    """
    if dprob_TK.ndim != 2:
        raise ValueError(f"dprob must be [T, K], not {list(dprob_TK.shape)}")
    config = _config(logits_TE, dprob_TK.shape[1], score, normalize, softmax_over)
    if not scale:
        raise ValueError("scale=0: the gradient cannot be computed from the probabilities")
    where, (T, E), factor = logits_TE.device, logits_TE.shape, _bits(scale)
    check(where, "logits", logits_TE, logits_TE.dtype, None)
    for name, tensor, dtype in (
        ("dprob", dprob_TK, torch.float32),
        ("idx", idx_TK, torch.int32),
        ("prob", prob_TK, torch.float32),
    ):
        check(where, name, tensor, dtype, (T, config.top_k))
    dlogits_TE = torch.empty_like(logits_TE)
    if T:
        tensors = dict(dprob=dprob_TK, idx=idx_TK, prob=prob_TK)
        tensors |= dict(logits=logits_TE, dlogits=dlogits_TE)
        launch(TopkGradientKernel, config, **tensors, T=T, E=E, scale=factor)
    return dlogits_TE


def _config(
    logits_TE: Tensor,
    top_k: int,
    score: str,
    normalize: bool,
    softmax_over: str,
    biased: bool = False,
    groups: tuple[int, int] = (1, 1),
) -> TopkConfig:
    if logits_TE.ndim != 2 or logits_TE.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"logits must be [T, E] in float32 or bfloat16, not {list(logits_TE.shape)} "
            f"in {logits_TE.dtype}"
        )
    T, E = logits_TE.shape
    if E % 8 or not 8 <= E <= MAX_EXPERTS or T >= 1 << 30:
        raise ValueError(
            f"logits [{T}, {E}]: experts must be a multiple of 8 up to {MAX_EXPERTS}, and tokens "
            "fewer than 2^30"
        )
    if not 1 <= top_k <= min(E, MAX_SLOTS):
        raise ValueError(f"top_k={top_k}: must be 1 to {min(E, MAX_SLOTS)} for {E} experts")
    if score not in ("softmax", "sigmoid") or softmax_over not in ("all", "topk"):
        raise ValueError(
            f"score={score}, softmax_over={softmax_over}: must be softmax or sigmoid, all or topk"
        )
    if biased and score != "sigmoid":
        raise ValueError("bias needs score=sigmoid")
    limit = _expert_groups(*groups, experts=E, top_k=top_k)
    if limit is not None and score != "sigmoid":
        raise ValueError("groups need score=sigmoid")
    normalize = normalize and top_k > 1
    if score == "sigmoid":
        weights = "sigmoid_sum" if normalize else "sigmoid"
    else:
        weights = "softmax" if normalize or softmax_over == "topk" else "softmax_all"
    vectors = -(-E // (FOUR * LANES))
    return TopkConfig(top_k, vectors, logits_TE.dtype == torch.bfloat16, weights, biased, limit)


def _expert_groups(number: int, chosen: int, *, experts: int, top_k: int) -> ExpertGroups | None:
    """Groups that limit the choice to the best `chosen` of `number`; None without a limit."""
    if why := impossible_groups(number, chosen, experts=experts, top_k=top_k):
        raise ValueError(f"groups={(number, chosen)}: {why}")
    if chosen == number:
        return None
    return ExpertGroups(number, experts // number, chosen, max(1, top_k // chosen))


def _bits(scale: float) -> int:
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be finite")
    return unpack("<i", pack("<f", scale))[0]
