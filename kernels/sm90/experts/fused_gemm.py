"""`fused_gemm`: a grouped GEMM with any `Epilogue`, for fusions that have no function of their own.

    acc[s] = a[index[s]] @ b[e(s)]^T, in registers; outputs and sums as the epilogue declares them

A new fusion is a declaration and a function on registers. One that also keeps h, for example:

    @dataclass(frozen=True)
    class ScaledSquaredRelu(Epilogue):  # a = scale[e] * relu(h)^2
        loads = (Load("scale", "expert"),)
        outputs = (Out("h"), Out("a"))

        def compute(self, at: Fragment) -> None:
            h = at.put("h", at.acc())  # as it is rounded
            relu = [cute.arch.fmax(x, Float32(0), nan=True) for x in h]
            at.put("a", [at.load("scale", i) * x * x for i, x in enumerate(relu)])

    made = fused_gemm(x, w, offsets, ScaledSquaredRelu(), scale=scale)  # "h" and "a"

With `loaded` rows, of h, and `put_each` it is a gradient; `sums` are reductions over the columns.
The kernel's roles, pipelines and barriers are those of `gemm.gemm`; a subclass adds arguments only.

Legend: S expert rows, K channels in, N columns of b, F = N / parts channels of an output's part, L
experts, C column tiles.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.gemm.epilogues import Epilogue
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig
from phalanx.kernels.sm90.gemm.operands import as_rows, is_transposed, rows, weights
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights, matrix, vector, words
from phalanx.kernels.sm90.jit.launch import launch_persistent, require
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp32Ptr, IntPtr


class Vectors(NamedTuple):
    """Loads and then sums of an epilogue, in the order that it declares; null behind the last."""

    v0: Fp32Ptr
    v1: Fp32Ptr
    v2: Fp32Ptr
    v3: Fp32Ptr


class FusedGemmKernel(Gemm):
    """Arguments by the epilogue's declaration."""

    @cute.jit
    def __call__(
        self,
        a: Rows,
        b: Weights,
        loaded: Bf16Ptr,
        first: Rows,
        last: Rows,
        vectors: Vectors,
        index: IntPtr,
        offsets: IntPtr,
        counter: IntPtr,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """`last` is the only output if there is one."""
        tensors = self._tensors(b, loaded, [first, last], vectors)
        args = self.config.epilogue.host(self.config.mainloop, *tensors)
        self.run(a, b, args, index, offsets, counter, None, last.rows, ctas, stream)

    def _tensors(
        self, b: Weights, loaded: cute.Pointer, outputs: list[Rows], vectors: Vectors
    ) -> list[Any]:
        """Host side: what the epilogue declares, in its order."""
        epilogue, columns = self.config.epilogue, self.config.mainloop.columns
        S, L, N = outputs[-1].rows, b.experts, b.columns
        tensors: list[Any] = outputs[-len(epilogue.outputs) :]
        if epilogue.loaded:
            tensors.insert(0, matrix(loaded, S, outputs[-1].channels * epilogue.loaded))
        for load, pointer in zip(epilogue.loads, vectors, strict=False):
            if load.per == "column":
                tensors.append(words(cute.recast_ptr(pointer, dtype=cutlass.Uint32), L, N))
            else:
                tensors.append(vector(pointer, S if load.per == "row" else L))
        layout = cute.make_layout(((N + (columns - 1)) // columns, S), stride=(S, 1))
        for pointer in vectors[len(epilogue.loads) :][: len(epilogue.sums)]:
            tensors.append(cute.make_tensor(pointer, layout))
        return tensors


def fused_gemm(
    a: Tensor,
    b_LNK: Tensor,
    offsets: Tensor,
    epilogue: Epilogue,
    *,
    loaded: Tensor | None = None,
    index_S: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    tile: str = "pp128",
    **loads: Tensor,
) -> dict[str, Tensor]:
    """Outputs and sums by name; rows of outputs are bf16 [S, parts * F], sums fp32 [C, S].

    Args:
        a: bf16 [rows, K], contiguous; S rows without an index. K is a multiple of 64.
        b_LNK: bf16, contiguous or the transpose of a contiguous [L, K, N]. N is a multiple of 64.
        offsets: int32 [L + 1], as in `grouped_gemm`; rows from offsets[L] on are not written.
        epilogue: stores one or two outputs in bf16, and has at most 4 loads and sums.
        loaded: bf16 [S, parts * F], if the epilogue loads rows.
        index_S: int32 row of a. tile: of `gemm.tiles.TILES`.
        loads: those that the epilogue uses, per row fp32 [S], per expert fp32 [L], per column bf16
            [L, N].

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    if loads.keys() != (wanted := {load.name for load in epilogue.loads if load.used}):
        raise ValueError(f"{type(epilogue).__name__} takes {sorted(wanted)}, not {sorted(loads)}")
    if (loaded is None) != (not epilogue.loaded):
        raise ValueError("loaded: give the rows that the epilogue loads, and none otherwise")
    device, S = a.device, len(a) if index_S is None else len(index_S)
    parts = epilogue.product_parts
    b = weights(device, "b", b_LNK, n_parts=parts)
    F = b.columns // parts
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "row": (torch.float32, (S,)),
        "expert": (torch.float32, (b.experts,)),
        "column": (torch.bfloat16, (b.experts, b.columns)),
    }
    require(
        device,
        offsets=(offsets, torch.int32, (b.experts + 1,)),
        index=(index_S, torch.int32, (S,)),
        loaded=(loaded, torch.bfloat16, (S, F * epilogue.loaded)),
        **{load.name: (loads.get(load.name), *kinds[load.per]) for load in epilogue.loads},
    )
    a_rows = rows("a", a, (len(a), b.channels))
    loop = tiles.configured(tile, gather=index_S is not None, transposed=is_transposed(b_LNK))
    C = -(-b.columns // loop.columns)
    outputs = {out.name: a.new_empty(S, F * out.parts) for out in epilogue.outputs}
    sums = {name: a.new_empty(C, S, dtype=torch.float32) for name in epilogue.sums}
    given = [*(loads.get(load.name) for load in epilogue.loads), *sums.values()]
    records: list[Any] = [as_rows(x) for x in outputs.values()]
    if S and len(a):
        launch_persistent(
            *(FusedGemmKernel, GemmConfig(epilogue, loop), device, options, None),
            **dict(a=a_rows, b=b, loaded=loaded, first=records[0], last=records[-1]),
            vectors=Vectors(*given, *[None] * (4 - len(given))),
            **dict(index=index_S, offsets=offsets),
        )
    return outputs | sums


def sum_of_experts(partial_CS: Tensor, offsets: Tensor) -> Tensor:
    """Sums of `fused_gemm` over the rows of each expert: fp32 [L], in a fixed order.

    Args:
        partial_CS: fp32; rows past offsets[L] may hold anything.
        offsets: int32 [L + 1].
    """
    rows_S = partial_CS.sum(0)
    return torch.segment_reduce(rows_S, "sum", offsets=offsets.long(), axis=0, initial=0)
