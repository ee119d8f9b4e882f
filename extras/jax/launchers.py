"""Host side of the kernels as `cutlass.jax.cutlass_call` takes it: from arrays to their arguments.

A launcher gets the stream, the arrays that are read, the counter of tiles, which it leaves 0, and
the arrays that are written; then what is compiled in. Arrays are contiguous.

Legend: S rows, E experts, D hidden, F expert width, H = 2F with a gate and F without, K and N
channels in and out, O and I channels of a weight, C column tiles.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32

from phalanx.kernels.sm90.gemm.gemm import Gemm
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights, matrix, vector, words
from phalanx.kernels.sm90.wgrad.kernel import Factor, WgradKernel

THREADS = 256
_PIECE = 8  # bf16 of a 16-byte store


@cute.jit
def fc1_act(
    stream: cuda.CUstream,
    x_SD: cute.Tensor,
    w1_EHD: cute.Tensor,
    offsets: cute.Tensor,
    prob_S: cute.Tensor | None,
    counter: cute.Tensor,
    a_SF: cute.Tensor,
    h_SH: cute.Tensor | None = None,
    *,
    config: cutlass.Constexpr,
    ctas: cutlass.Constexpr,
) -> None:
    """h[s] = x[s] @ w1[e]^T, written if it is given, and a[s] = act(h[s]) * prob[s]."""
    E, H, D = (Int32(n) for n in w1_EHD.shape)
    S, unused = Int32(x_SD.shape[0]), offsets.iterator
    h, prob = _pointer(h_SH, BFloat16, unused), _pointer(prob_S, Float32, unused)
    epilogue = config.epilogue.host(
        *(config.mainloop, matrix(h, S, H), _rows(a_SF), words(_as(unused, Uint32), E, H)),
        vector(prob, S),
    )
    operands = _rows(x_SD), _weights(w1_EHD, E, H, D), epilogue
    _run(config, operands, offsets, counter, S, ctas, stream)


@cute.jit
def grouped_gemm(
    stream: cuda.CUstream,
    a_SK: cute.Tensor,
    w: cute.Tensor,
    offsets: cute.Tensor,
    counter: cute.Tensor,
    y_SN: cute.Tensor,
    *,
    config: cutlass.Constexpr,
    ctas: cutlass.Constexpr,
) -> None:
    """y[s] = a[s] @ w[e]^T; w is [E, N, K], or [E, K, N] with a loop for transposed weights."""
    (S, K), N, E = (Int32(n) for n in a_SK.shape), Int32(y_SN.shape[1]), Int32(w.shape[0])
    unused = offsets.iterator
    epilogue = config.epilogue.host(
        *(config.mainloop, matrix(y_SN.iterator, S, N), words(_as(unused, Uint32), E, N)),
        vector(_as(unused, Float32), S),
        *(unused, E, Int32(0), Int32(0)),  # of a kernel that signals
    )
    operands = _rows(a_SK), _weights(w, E, N, K), epilogue
    _run(config, operands, offsets, counter, S, ctas, stream)


@cute.jit
def fc2_dgrad_dact(
    stream: cuda.CUstream,
    dy_SD: cute.Tensor,
    w2_EDF: cute.Tensor,
    h_SH: cute.Tensor,
    offsets: cute.Tensor,
    prob_S: cute.Tensor | None,
    counter: cute.Tensor,
    dh_SH: cute.Tensor,
    a_SF: cute.Tensor,
    dprob_CS: cute.Tensor | None = None,
    *,
    config: cutlass.Constexpr,
    ctas: cutlass.Constexpr,
) -> None:
    """dA[s] = dy[s] @ w2[e], in registers; gradient of h, activations, parts of prob's gradient."""
    E, D, F = (Int32(n) for n in w2_EDF.shape)
    S, H = (Int32(n) for n in h_SH.shape)
    columns, unused = config.loop.columns, offsets.iterator
    prob, dprob = (_pointer(x, Float32, unused) for x in (prob_S, dprob_CS))
    layout = cute.make_layout(((F + (columns - 1)) // columns, S), stride=(S, 1))
    epilogue = config.epilogue.host(
        *(config.mainloop, matrix(h_SH.iterator, S, H), _rows(dh_SH), _rows(a_SF)),
        *(vector(prob, S), cute.make_tensor(dprob, layout)),
    )
    operands = _rows(dy_SD), _weights(w2_EDF, E, F, D), epilogue
    _run(config, operands, offsets, counter, S, ctas, stream)


@cute.jit
def wgrad(
    stream: cuda.CUstream,
    d_SO: cute.Tensor,
    v_SI: cute.Tensor,
    offsets: cute.Tensor,
    counter: cute.Tensor,
    dw_EOI: cute.Tensor,
    *,
    config: cutlass.Constexpr,
    ctas: cutlass.Constexpr,
) -> None:
    """dw[e] = sum over the rows s of expert e of outer(d[s], v[s]); zeros without rows."""
    index, order, operands = offsets.iterator, offsets.iterator, (_factor(d_SO), _factor(v_SI))
    pointers = _as(dw_EOI.iterator, Uint8), index, offsets.iterator, order, counter.iterator
    WgradKernel(config)(*operands, *pointers, Int32(dw_EOI.shape[0]), Int32(ctas), stream)


@cute.jit
def clear_padding(
    stream: cuda.CUstream,
    y_SD: cute.Tensor,
    offsets: cute.Tensor,
    ctas: cutlass.Constexpr,
) -> None:
    """Rows from the last expert's end on become 0; others are left alone. D is a multiple of 8."""
    S, D = (Int32(n) for n in y_SD.shape)
    _clear(_as(y_SD.iterator, Uint32), offsets, S, D // _PIECE).launch(
        grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@cute.kernel
def _clear(first: cute.Pointer, offsets: cute.Tensor, S: Int32, width: Int32) -> None:
    """A thread stores 16 bytes at a time; a row has `width` of these."""
    zeros = cute.make_rmem_tensor(_PIECE // 2, Uint32)
    zeros.fill(0)
    # 64 bits: S * D may exceed 2^31.
    at = Int64(offsets[offsets.shape[0] - 1]) * width
    at += cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    while at < Int64(S) * width:
        piece = cute.make_tensor(first + at * (_PIECE // 2), cute.make_layout(_PIECE // 2))
        cute.autovec_copy(zeros, piece)
        at += cute.arch.grid_dim()[0] * THREADS


def _run(
    config: Any,
    operands: tuple[Any, ...],
    offsets: cute.Tensor,
    counter: cute.Tensor,
    S: Int32,
    ctas: int,
    stream: cuda.CUstream,
) -> None:
    """Launch a grouped GEMM whose rows are neither picked by an index nor still in flight."""
    index, ready = offsets.iterator, None
    pointers = index, offsets.iterator, counter.iterator, ready
    Gemm(config).run(*operands, *pointers, S, Int32(ctas), stream)


def _rows(x: cute.Tensor) -> Rows:
    return Rows(*_matrix(x), Int32(1), Int32(x.shape[1]), Int32(0), Int32(0))


def _weights(w: cute.Tensor, E: Int32, columns: Int32, channels: Int32) -> Weights:
    data, none = _as(w.iterator, Uint8), _as(w.iterator, Float32)
    return Weights(data, none, E, columns, channels, Int32(1), *[Int32(0)] * 4)


def _factor(x: cute.Tensor) -> Factor:
    return Factor(*_matrix(x), Int32(1), Int32(0), Int32(0))


def _matrix(x: cute.Tensor) -> tuple[Any, Any, Any, Any]:
    rows, channels = map(Int32, x.shape)
    return _as(x.iterator, Uint8), _as(x.iterator, Float32), rows, channels


def _pointer(x: cute.Tensor | None, dtype: Any, unused: cute.Pointer) -> cute.Pointer:
    return _as(unused, dtype) if x is None else x.iterator


def _as(pointer: cute.Pointer, dtype: Any) -> cute.Pointer:
    return cute.recast_ptr(pointer, dtype=dtype)
