"""QuACK's RMSNorm kernels, compiled for sm_90a and stored in the cache of `kernels.cache`.

The library's own cache on disk fails when a lock is held for 15 seconds or its folder cannot be
written, and has an entry for every power of two of rows, though its kernels take any number.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from phalanx.kernels.cache import Cache, folder
from phalanx.kernels.library_objects import ARCH, entry_name, exported, loaded, replaced

_HOPPER = 9
_BITS = 16


@dataclass(frozen=True)
class Rows:
    """Key of a compiled kernel: bf16 rows, any number of them."""

    channels: int
    step: Literal["forward", "backward"]
    adds: bool  # a residual forward, with the sum written; backward the gradient of the sum
    fp32_weight: bool = False  # the weight is fp32, not bf16

    @property
    def entry(self) -> str:
        return entry_name("RmsNorm", self)


_CENTERED = tuple(
    Rows(N, step, adds, fp32_weight=True)  # type: ignore[arg-type]
    for N in (256, 2048, 32, 128)  # Qwen3-Next and its tiny model: heads, hidden, each
    for step in ("forward", "backward")
    for adds in (False, True)
    if not adds or N in (2048, 128)
)
_WIDTHS = (
    *(128, 2048),  # Qwen3: heads, hidden
    2880,  # GPT-OSS
    *(512, 1536, 7168),  # DeepSeek-V3 and Moonlight (2048): latents, hidden
    *(32, 64),  # tiny (128), tiny_deepseek
)
SHIPPED = tuple(
    Rows(N, step, adds)  # type: ignore[arg-type]
    for N in _WIDTHS
    for step in ("forward", "backward")
    for adds in (False, True)
    if not adds or N in (128, 2048, 2880, 7168)
)
SHIPPED += _CENTERED
"""Kernels of the models in configs/model; others are compiled at their first launch."""


@functools.cache
def program(rows: Rows) -> Callable[..., None]:
    """The function that launches a kernel on torch's current stream.

    The forward kernel takes x, weight, None, residual, normed, sum, rstd, None and eps; the
    backward one sum, weight, dnormed, dsum, rstd, None, dx, partial gradients of the weight, None,
    None and their number. Absent tensors are None.
    """
    function: Callable[..., None] = loaded(build(rows, folder()))
    return function


def build(rows: Rows, cache_folder: Path) -> bytes:
    """The kernel's object from the cache in a folder, built if it is missing; needs no GPU."""
    return Cache(cache_folder).fetch(rows.entry, lambda: exported(_compile(rows)))


def _compile(rows: Rows) -> Any:
    from cutlass import BFloat16, Float32
    from cutlass.cutlass_dsl import CuTeDSL
    from quack.rmsnorm_config import RmsNormBwdConfig, RmsNormFwdConfig

    library: Any = import_module("quack.rmsnorm")  # the package has a function of that name
    N, addend = rows.channels, BFloat16 if rows.adds else None
    weight = Float32 if rows.fp32_weight else BFloat16
    with replaced(CuTeDSL._get_dsl().envar, "_arch", ARCH):
        if rows.step == "forward":
            return library._compile_rmsnorm_fwd.__wrapped__(
                dtype=BFloat16,
                out_dtype=BFloat16,
                res_dtype=addend,
                weight_dtype=weight,
                bias_dtype=None,
                res_out_dtype=addend,
                N=N,
                has_rstd=True,
                has_mean=False,
                is_layernorm=False,
                per_head=False,
                config=RmsNormFwdConfig.from_analytical_heuristic(N, _BITS, arch_major=_HOPPER),
            )
        return library._compile_rmsnorm_bwd.__wrapped__(
            N=N,
            dtype=BFloat16,
            dout_dtype=BFloat16,
            dx_dtype=BFloat16,
            weight_dtype=weight,
            has_db_partial=False,
            dres_dtype=None,
            dres_out_dtype=addend,
            has_dw_partial=True,
            config=RmsNormBwdConfig.from_analytical_heuristic(N, _BITS, _BITS, arch_major=_HOPPER),
        )
