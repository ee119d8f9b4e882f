"""Compile kernels of this package and call them with torch tensors, on the current stream.

A kernel is compiled once per configuration and process, for any sizes. A call reads no tensor on
the host and can be captured in a CUDA graph; the first call of a configuration, which compiles and
loads, has to come before the capture.
"""

import functools
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from kernels.sm90.rows import RowsConfig, RowsKernel

ARCH = "sm_90a"
_BLOCK = 64
_ALIGN = 16


def compile_rows(config: RowsConfig, options: str = "") -> Any:
    """The compiled `rows` kernel of a configuration; needs no GPU.

    `options` are further ones of `cute.compile`, such as `--keep-cubin`.
    """
    pointers = [make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=a) for dtype, a in _TYPES]
    sizes = tuple(Int32(0) for _ in range(4))
    return cute.compile(
        RowsKernel(config),
        *pointers,
        sizes,
        Int32(1),
        cuda.CUstream(0),
        options=f"--gpu-arch {ARCH} {options}".strip(),
    )


_TYPES = (
    (cutlass.BFloat16, _ALIGN),
    (cutlass.BFloat16, _ALIGN),
    (cutlass.BFloat16, _ALIGN),
    (cutlass.Uint32, 4),
    (cutlass.Float32, 4),
    (cutlass.Int32, 4),
    (cutlass.Int32, 4),
)
"""Element and alignment of a, w, y, bias, scale, offsets and counter."""


@functools.cache
def _rows_kernel(config: RowsConfig) -> Any:
    return compile_rows(config)


@functools.cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def clusters_beside(sms: int, sm_margin: int, cluster: int) -> int:
    """Clusters that leave `sm_margin` of `sms` SMs free, at least 1."""
    if sm_margin < 0:
        raise ValueError(f"sm_margin={sm_margin}: must not be negative")
    return max(1, (sms - sm_margin) // cluster)


def choose(N: int) -> tuple[int, int]:
    """Columns of a tile and CTAs of a cluster: of the two wide tiles the one that wastes less."""
    return min((256, 192), key=lambda columns: -N % columns), 2


def rows(
    a_SK: Tensor,
    w_LNK: Tensor,
    offsets: Tensor,
    *,
    bias_LN: Tensor | None = None,
    scale_S: Tensor | None = None,
    out_SN: Tensor | None = None,
    counter: Tensor | None = None,
    sm_margin: int = 0,
    dynamic: bool = True,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """y[s] = a[s] @ w[e(s)]^T (+ bias[e(s)] * scale[s]), in fp32, rounded once.

    Args:
        a_SK: bf16, contiguous; K a multiple of 64.
        w_LNK: bf16 [L, N, K], contiguous or the transpose of a contiguous [L, K, N]; N a multiple
            of 64.
        offsets: int32 [L + 1], not decreasing, at most S: expert e has rows offsets[e] to
            offsets[e + 1].
        bias_LN: bf16, contiguous, together with scale_S: fp32.
        out_SN: bf16, contiguous; rows from offsets[L] on are not written.
        counter: int32 [1], 0 before the call and 0 after it; launches that may overlap must not
            share one. Default: a new one.
        sm_margin: SMs to leave free, rounded up to whole clusters.
        dynamic: claim tiles on the device; otherwise deal them out in turn.
        tile: columns of a tile (128, 192, 256) and CTAs of a cluster (1, 2); default `choose`.

    Returns:
        y_SN in bf16.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    if a_SK.ndim != 2 or w_LNK.ndim != 3:
        raise ValueError(f"a must be [S, K] and w [L, N, K], not {_shapes(a_SK, w_LNK)}")
    (S, K), (L, N, _) = a_SK.shape, w_LNK.shape
    transposed = not w_LNK.is_contiguous()
    out = a_SK.new_empty(S, N) if out_SN is None else out_SN
    if (bias_LN is None) != (scale_S is None):
        raise ValueError("bias and scale: give both or none")
    if K % _BLOCK or N % _BLOCK or not K or not N or not L:
        raise ValueError(f"N={N}, K={K}, L={L}: N and K must be positive multiples of {_BLOCK}")
    if counter is None:
        counter = torch.zeros(1, dtype=torch.int32, device=a_SK.device)
    bf16 = torch.bfloat16
    _check(a_SK.device, "a", a_SK, bf16, (S, K))
    _check(a_SK.device, "w", w_LNK.mT if transposed else w_LNK, bf16, None)
    if w_LNK.shape[2] != K:
        raise ValueError(f"w must be [L, N, K={K}], not {list(w_LNK.shape)}")
    _check(a_SK.device, "offsets", offsets, torch.int32, (L + 1,))
    _check(a_SK.device, "out", out, bf16, (S, N))
    _check(a_SK.device, "counter", counter, torch.int32, (1,))
    _check(a_SK.device, "bias", bias_LN, bf16, (L, N))
    _check(a_SK.device, "scale", scale_S, torch.float32, (S,))
    columns, cluster = choose(N) if tile is None else tile
    config = RowsConfig(columns, cluster, transposed, bias_LN is not None, dynamic)
    if S == 0:
        return out
    tensors = (a_SK, w_LNK, out, bias_LN, scale_S, offsets, counter)
    _launch(_rows_kernel(config), tensors, (S, N, K, L), sm_margin, cluster)
    return out


def _launch(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    sm_margin: int,
    cluster: int,
) -> None:
    device = tensors[0].device  # type: ignore[union-attr]
    pointers = [
        make_ptr(
            dtype, 0 if t is None else t.data_ptr(), cute.AddressSpace.gmem, assumed_align=align
        )
        for t, (dtype, align) in zip(tensors, _TYPES, strict=True)
    ]
    with torch.cuda.device(device):
        kernel(
            *pointers,
            tuple(Int32(n) for n in sizes),
            Int32(clusters_beside(_sms(device.index), sm_margin, cluster)),
            cuda.CUstream(torch.cuda.current_stream(device).cuda_stream),
        )


def _check(
    device: torch.device,
    name: str,
    tensor: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...] | None,
) -> None:
    if tensor is None:
        return
    if not tensor.is_cuda or tensor.device != device:
        raise ValueError(f"{name} must be on the CUDA device of a, not on {tensor.device}")
    if tensor.dtype != dtype or (shape is not None and tensor.shape != shape):
        wanted = "" if shape is None else f" {list(shape)}"
        raise ValueError(f"{name} must be {dtype}{wanted}, not {tensor.dtype} {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tensor.stride()}")
    if dtype == torch.bfloat16 and tensor.data_ptr() % _ALIGN:
        raise ValueError(f"{name} must start at a multiple of {_ALIGN} bytes")


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(list(t.shape)) for t in tensors)
