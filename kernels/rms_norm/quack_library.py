"""QuACK's kernels of RMSNorm, compiled for sm_90a and kept in the cache of `kernels.cache`.

The library's own cache on disk gives up when a lock is held for 15 seconds, fails in a folder that
it cannot write to, and has an entry for every power of two of rows, though its kernels for Hopper
take any number of them.
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
    """What a kernel is compiled for: bf16 rows, any number of them."""

    channels: int
    step: Literal["forward", "backward"]
    adds: bool
    """Forward a residual, which makes a sum that is written too; backward the sum's gradient."""
    wide: bool = False
    """The weight is fp32."""

    @property
    def entry(self) -> str:
        """Name in a `Cache`."""
        return entry_name("RmsNorm", self)


_CENTERED = tuple(
    Rows(N, step, adds, wide=True)  # type: ignore[arg-type]
    for N in (256, 2048)  # Qwen3-Next: heads, hidden
    for step in ("forward", "backward")
    for adds in (False, True)
    if not adds or N == 2048
)
_WIDTHS = (
    *(128, 2048),  # Qwen3: heads, hidden
    2880,  # GPT-OSS
    *(512, 1536, 7168),  # DeepSeek-V3 and Moonlight (2048): latents, hidden
)
SHIPPED = tuple(
    Rows(N, step, adds)  # type: ignore[arg-type]
    for N in _WIDTHS
    for step in ("forward", "backward")
    for adds in (False, True)
    if not adds or N in (2048, 2880, 7168)
)
SHIPPED += _CENTERED
"""Of the models in configs/model; others are compiled when they are first launched."""


@functools.cache
def program(rows: Rows) -> Callable[..., None]:
    """The function that launches a kernel on torch's current stream.

    Forward it takes x, weight, None, residual, normed, sum, rstd, None and eps; backward sum,
    weight, dnormed, dsum, rstd, None, dx, partial gradients of the weight, None, None and their
    number. What there is not is None.
    """
    function: Callable[..., None] = loaded(build(rows, folder()))
    return function


def build(rows: Rows, where: Path) -> bytes:
    """The kernel's object from the cache in a folder, where it is put if it is missing; needs no
    GPU."""
    return Cache(where).fetch(rows.entry, lambda: exported(_compile(rows)))


def _compile(rows: Rows) -> Any:
    from cutlass import BFloat16, Float32
    from cutlass.cutlass_dsl import CuTeDSL
    from quack.rmsnorm_config import RmsNormBwdConfig, RmsNormFwdConfig

    library: Any = import_module("quack.rmsnorm")  # the package has a function of that name
    N, more = rows.channels, BFloat16 if rows.adds else None
    weight = Float32 if rows.wide else BFloat16
    with replaced(CuTeDSL._get_dsl().envar, "_arch", ARCH):
        if rows.step == "forward":
            return library._compile_rmsnorm_fwd.__wrapped__(
                dtype=BFloat16,
                out_dtype=BFloat16,
                res_dtype=more,
                weight_dtype=weight,
                bias_dtype=None,
                res_out_dtype=more,
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
            dres_out_dtype=more,
            has_dw_partial=True,
            config=RmsNormBwdConfig.from_analytical_heuristic(N, _BITS, _BITS, arch_major=_HOPPER),
        )
