"""Kernel `topk_backward`: gradient of the router's logits from that of the probabilities.

One warp a token. The gradients at the K chosen experts are computed by K lanes, scattered into a
row in shared memory and written with the zeros of the others; only a softmax over all logits has a
gradient at every expert, and rereads the logits.

Roles. 8 warps of a CTA, a token each; they share no data, so there is no barrier but `sync_warp`:

    each warp    zeros to its row in shared memory
                 -- sync_warp --
    lane k < K   expert, gradient and probability k to registers; sums over K are warp sums
                 the gradient of its logit to the expert's place in the row
                 -- sync_warp --
    each warp    the row to global memory, four successive experts a lane

Legend: T tokens, E experts, K experts per token.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit.pointers import Fp32Ptr, IntPtr, WordVecPtr
from phalanx.kernels.sm90.jit.ptx import pack
from phalanx.kernels.sm90.routing.logits import (
    FOUR,
    LANES,
    TINY,
    WARPS,
    Logits,
    TopkConfig,
    as_bits,
    as_float,
    load_one,
    sigmoid,
    sum_exp,
    warp_sum,
    words_of,
)


class TopkGradientKernel:
    """The kernel of a configuration, as `cute.compile` takes it."""

    def __init__(self, config: TopkConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        dprob: Fp32Ptr,
        idx: IntPtr,
        prob: Fp32Ptr,
        logits: WordVecPtr,
        dlogits: WordVecPtr,
        T: Int32,
        E: Int32,
        scale: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """dprob, idx, prob [T, K]; logits, dlogits [T, E] in words; `scale`: bits of an fp32."""
        self.kernel(dprob, idx, prob, logits, dlogits, T, E, scale).launch(
            grid=[(T + (WARPS - 1)) // WARPS, 1, 1],
            block=[WARPS * LANES, 1, 1],
            # As in `topk`: registers for a lane's part of the row, rather than more CTAs.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        dprob: cute.Pointer,
        idx: cute.Pointer,
        prob: cute.Pointer,
        logits: cute.Pointer,
        dlogits: cute.Pointer,
        T: Int32,
        E: Int32,
        scale: Int32,
    ) -> None:
        config = self.config
        # Rounded up to whole vectors of the warp, so that no lane's access needs a test.
        size = config.vectors * LANES * FOUR
        memory = cutlass.utils.SmemAllocator().allocate(
            struct(spread=array(Float32, WARPS * size, 16))
        )
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        # A row for each warp, aligned to the 16 bytes in which a lane reads it.
        spread = memory.spread.get_tensor(cute.make_layout((size, WARPS)))[None, warp]
        token = cute.arch.block_idx()[0] * WARPS + warp
        if token < T:
            row, out = Logits.of(config, logits, token, E), Logits.of(config, dlogits, token, E)
            factor = as_float(Uint32(scale))
            for i in cutlass.range_constexpr(config.vectors * FOUR):
                spread[i * LANES + lane] = Float32(0)
            cute.arch.sync_warp()  # zeros of all lanes before the chosen experts' values
            # Without the factor: p, and the gradient of that p. Other lanes add 0 to the sums.
            expert, grad, p = Int32(-1), Float32(0), Float32(0)
            if lane < config.top_k:
                at = Int64(token) * config.top_k + lane
                # Of p before the factor, by which the forward pass multiplied last.
                expert, grad = load_one(idx + at), load_one(dprob + at) * factor
                # p from the stored probability: no logit is read for a softmax over the chosen.
                p = load_one(prob + at) / factor
            # One unsigned comparison: neither -1 nor an id past the last expert is written to.
            chosen = Uint32(expert) < Uint32(E)
            if cutlass.const_expr(config.weights == "softmax_all"):
                self._spread(spread, expert, grad, chosen)
                # The softmax is over all logits: those that were not chosen have a gradient too.
                self._everywhere(row, out, spread, warp_sum(grad * p))
            else:
                # A softmax's derivative follows from p; a sigmoid is computed again from its logit.
                logit = Float32(0)
                if cutlass.const_expr(config.weights != "softmax"):
                    if chosen:
                        logit = row.one(expert)
                self._spread(spread, expert, self._at_chosen(grad, p, logit, chosen), chosen)
                self._write(out, self._read(spread))

    @cute.jit
    def _at_chosen(
        self, grad: Float32, p: Float32, logit: Float32, chosen: cutlass.Boolean
    ) -> Float32:
        """Gradient of a lane's chosen logit from that of its probability p, both unscaled."""
        weights = self.config.weights
        if cutlass.const_expr(weights == "softmax"):
            return p * (grad - warp_sum(grad * p))
        else:
            s = Float32(0)
            if chosen:
                s = sigmoid(logit)
            # Through the division by the sum, whose TINY is the forward pass's.
            if cutlass.const_expr(weights == "sigmoid_sum"):
                total = warp_sum(s) + Float32(TINY)
                grad = (grad - warp_sum(grad * (s / total))) / total
            # Through the sigmoid: s' = s * (1 - s).
            return grad * (s * (Float32(1) - s))

    @cute.jit
    def _everywhere(self, row: Logits, out: Logits, spread: cute.Tensor, mean: Float32) -> None:
        """Softmax over all: q * (gradient - mean), the gradient 0 at experts not chosen."""
        # -inf past the last expert: it is no maximum, and `sum_exp` leaves those lanes out.
        x = row.load(Float32(-float("inf")))
        largest = x[0]
        for i in cutlass.range_constexpr(1, FOUR * self.config.vectors):
            largest = cute.arch.fmax(largest, x[i])
        # A butterfly leaves the maximum in all lanes.
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(largest, 1 << step)
            largest = cute.arch.fmax(largest, other)
        # The forward pass's sum, in the same order.
        share = Float32(1) / warp_sum(sum_exp(row, x, largest))
        grad = self._read(spread)
        for i in cutlass.range_constexpr(FOUR * self.config.vectors):
            grad[i] = cute.math.exp(x[i] - largest) * share * (grad[i] - mean)
        self._write(out, grad)

    @cute.jit
    def _spread(
        self, spread: cute.Tensor, expert: Int32, value: Float32, chosen: cutlass.Boolean
    ) -> None:
        if chosen:
            spread[expert] = value  # experts of a token are distinct: no two lanes meet
        cute.arch.sync_warp()  # values of all lanes before any lane reads its part

    @cute.jit
    def _read(self, spread: cute.Tensor) -> cute.Tensor:
        x = cute.make_rmem_tensor((FOUR, self.config.vectors), Float32)
        for v in cutlass.range_constexpr(self.config.vectors):
            at = (v * LANES + cute.arch.lane_idx()) * FOUR
            source = cute.make_tensor(spread.iterator + at, cute.make_layout(FOUR))
            cute.autovec_copy(source, x[None, v])
        return x

    @cute.jit
    def _write(self, out: Logits, x: cute.Tensor) -> None:
        for v in cutlass.range_constexpr(self.config.vectors):
            if out.expert(v) < out.experts:
                words = cute.make_rmem_tensor(words_of(self.config), Uint32)
                for i in cutlass.range_constexpr(words_of(self.config)):
                    if cutlass.const_expr(self.config.bf16):
                        words[i] = pack(x[2 * i, v], x[2 * i + 1, v])
                    else:
                        words[i] = as_bits(x[i, v])
                cute.autovec_copy(words, out.vector(v))
