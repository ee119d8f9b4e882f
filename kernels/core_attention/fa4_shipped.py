"""Kernels of flash-attn-4 for the models in configs/model, compiled ahead of time without a GPU.

The library compiles for the tensors of a `FakeTensorMode`, which have no memory, without launching.
A kernel serves any batch, any number of heads and any sequence longer than its tile. Other kernels
are compiled at their first launch.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.kernels.cache import use_folder
from phalanx.kernels.core_attention.documents import Documents
from phalanx.kernels.core_attention.fa4 import run_backward, run_forward
from phalanx.kernels.core_attention.fa4_library import library, named
from phalanx.kernels.library_objects import ARCH, replaced

_H100_SMS = 132  # asked for in any case, and used on Blackwell


@dataclass(frozen=True)
class AttentionLayer:
    """Key of an attention layer's compiled kernels."""

    group: int  # query heads per key-value head
    d: int  # channels of query and key
    v: int  # channels of value
    window: bool = False
    sinks: bool = False
    deterministic: bool = False
    documents: bool = False  # attention within documents of a sequence


_LAYERS = (
    AttentionLayer(1, 128, 128),  # OLMoE
    AttentionLayer(4, 128, 128),  # Mixtral-8x7B
    AttentionLayer(6, 128, 128),  # Mixtral-8x22B, MiniMax-M2
    AttentionLayer(8, 128, 128),  # Qwen3-30B
    AttentionLayer(12, 128, 128),  # GLM-4.5
    AttentionLayer(16, 128, 128),  # Qwen3-235B
    AttentionLayer(8, 64, 64, sinks=True),  # GPT-OSS
    AttentionLayer(8, 64, 64, window=True, sinks=True),
    AttentionLayer(1, 192, 128),  # DeepSeek, Kimi-K2, Moonlight
    AttentionLayer(8, 256, 256),  # Qwen3-Next
)
SHIPPED = tuple(
    AttentionLayer(**vars(layer) | dict(deterministic=deterministic))
    for deterministic, layer in product((False, True), _LAYERS)
)


def entries(layer: AttentionLayer) -> set[str]:
    """Names in a `Cache` of the forward and backward kernels of a layer."""
    with named() as names:
        _call(layer)
    return names


def build(layer: AttentionLayer, cache_folder: Path) -> None:
    """Compile the kernels of a layer that are not in a folder yet; needs no GPU."""
    with use_folder(cache_folder):
        _call(layer)


def _call(layer: AttentionLayer) -> None:
    S, B, G, H = 1024, 1 if layer.documents else 2, 2, 2 * layer.group
    with without_gpu(), FakeTensorMode():
        bf16 = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
        q, k, v = bf16(S, B, H, layer.d), bf16(S, B, G, layer.d), bf16(S, B, G, layer.v)
        sinks = bf16(H) if layer.sinks else None
        window = S // 2 if layer.window else 0
        documents = None
        if layer.documents:
            position = torch.empty(S, dtype=torch.int64, device="cuda")
            documents = Documents(position, places=16, longest=S)
        out, lse = run_forward(q, k, v, sinks, 1.0, window, documents)
        saved, options = [q, k, v, out, lse], (1.0, window, layer.deterministic, documents)
        run_backward(torch.empty_like(out), saved, sinks, *options)


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, a GPU's properties that the library, the compiler and torch query are constants."""
    from cutlass.cute.runtime import from_dlpack
    from cutlass.cutlass_dsl import CuTeDSL
    from flash_attn.cute import utils

    interface, settings = library(), CuTeDSL._get_dsl().envar
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (interface, "_get_device_arch", lambda: 90),
            (interface, "get_num_sms_for_selection", lambda *args: _H100_SMS),
            (settings, "_arch", ARCH),
            # torch's export of a tensor queries the current device.
            (utils, "from_dlpack", partial(from_dlpack, enable_tvm_ffi=True)),
        ):
            stack.enter_context(replaced(owner, name, value))
        # If Megatron-Core runs on this process's CPU, "cuda" is redirected to it, but not in here.
        stack.enter_context(torch._C.DisableTorchFunction())
        yield
