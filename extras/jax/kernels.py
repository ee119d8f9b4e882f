"""The operations of `grouped_mlp` by the kernels for Hopper, as custom calls of XLA.

Their sources are those of torch's backend (`kernels.sm90`), compiled for sm_90a when a computation
is lowered, which takes no GPU. Rows of the padding are 0 in y and dx; elsewhere they are not
written, and no kernel reads them.

Legend: S rows, E experts, D hidden, F expert width, H = 2F with a gate and F without, O and I
channels of a weight, C column tiles.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from cutlass.jax import cutlass_call
from cutlass.runtime import find_runtime_libraries

from phalanx.jax import launchers
from phalanx.jax.varying import vary_alike
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad, Linear
from phalanx.kernels.sm90.gemm.gemm import GemmConfig
from phalanx.kernels.sm90.wgrad.bf16 import Contraction
from phalanx.kernels.sm90.wgrad.kernel import WgradConfig, choose

_SMS = 132  # of H100 and H200 in an SXM module


class Kernels:
    """The operations in one trace, as in `reference`; their kernels share a counter of tiles."""

    def __init__(self) -> None:
        # Each kernel finds it 0 and leaves it 0. Passed from one to the next, it keeps XLA from
        # running two of them at a time.
        self._counter = jnp.zeros(1, jnp.int32)

    def fc1_act(
        self, x_SD: Any, w1_EHD: Any, offsets: Any, prob_S: Any, act: Activation, keep_h: bool
    ) -> tuple[Any, Any]:
        (S, D), H = x_SD.shape, w1_EHD.shape[1]
        parts = act.facts.halves
        loop = tiles.choose("fc1_act", H // parts, D, transposed=False, num_gate_parts=parts)
        config = GemmConfig(Act(act, keep_h=keep_h, prob=prob_S is not None), loop)
        outputs = [_bf16(S, H // parts), *([_bf16(S, H)] if keep_h else [])]
        a, *h = self._call(launchers.fc1_act, config, (x_SD, w1_EHD, offsets, prob_S), outputs)
        return h[0] if keep_h else None, a

    def fc2(self, a_SF: Any, w2_EDF: Any, offsets: Any) -> Any:
        _, D, F = w2_EDF.shape
        return self._rows(a_SF, w2_EDF, offsets, D, F, transposed=False)

    def fc2_dgrad_dact(
        self, dy_SD: Any, w2_EDF: Any, h_SH: Any, offsets: Any, prob_S: Any, act: Activation
    ) -> tuple[Any, Any, Any]:
        (S, H), (_, D, F) = h_SH.shape, w2_EDF.shape
        loop = tiles.choose("fc2_dgrad_dact", F, D, transposed=True)
        if act.kind == "geglu":  # as in `kernels.sm90.experts.fc2_dgrad_dact`
            loop = tiles.configured("pp128", transposed=True)
        config = GemmConfig(ActGrad(act, prob_S is not None), loop)
        outputs = [_bf16(S, H), _bf16(S, F)]
        if prob_S is not None:
            outputs.append(jax.ShapeDtypeStruct((-(-F // loop.columns), S), jnp.float32))
        inputs = dy_SD, w2_EDF, h_SH, offsets, prob_S
        dh, a, *partial_CS = self._call(launchers.fc2_dgrad_dact, config, inputs, outputs)
        if prob_S is None:
            return dh, a, None
        return dh, a, jnp.where(jnp.arange(S) < offsets[-1], partial_CS[0].sum(0), 0)

    def fc1_dgrad(self, dh_SH: Any, w1_EHD: Any, offsets: Any) -> Any:
        _, H, D = w1_EHD.shape
        return self._rows(dh_SH, w1_EHD, offsets, D, H, transposed=True)

    def wgrad(self, d_SO: Any, v_SI: Any, offsets: Any) -> Any:
        config = WgradConfig(Contraction(choose(v_SI.shape[1])))
        output = _bf16(offsets.shape[0] - 1, d_SO.shape[1], v_SI.shape[1])
        return self._call(launchers.wgrad, config, (d_SO, v_SI, offsets), [output])[0]

    def _rows(
        self, a: Any, w: Any, offsets: Any, columns: int, depth: int, *, transposed: bool
    ) -> Any:
        loop = tiles.choose("grouped_gemm", columns, depth, transposed=transposed)
        config, output = GemmConfig(Linear(), loop), _bf16(a.shape[0], columns)
        y = self._call(launchers.grouped_gemm, config, (a, w, offsets), [output])[0]
        clear = _cutlass(launchers.clear_padding, [output], {0: 0}, ctas=_ctas())
        return vary_alike(clear(y, offsets), like=(y,))[0]

    def _call(
        self, launcher: Any, config: Any, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> list[Any]:
        counter = self._counter
        every = [jax.ShapeDtypeStruct(counter.shape, counter.dtype), *outputs]
        call = _cutlass(launcher, every, {len(inputs): 0}, config=config, ctas=_ctas())
        self._counter, *results = call(*inputs, counter)
        return vary_alike(results, like=inputs)


def _cutlass(
    launcher: Any, outputs: Sequence[Any], aliases: dict[int, int], **constants: Any
) -> Callable[..., Any]:
    """The custom call of a launcher; `aliases` are inputs that an output takes the place of."""
    _load_runtime()
    return cutlass_call(
        launcher,
        **dict(output_shape_dtype=tuple(outputs), input_output_aliases=aliases),
        compile_options="--gpu-arch sm_90a",
        # Without it the kernel is traced a second time at each lowering to find it.
        compile_key=launcher,
        **constants,
    )


@cache
def _load_runtime() -> None:
    """Load the compiler's runtime, which an object needs also where there is no GPU."""
    for library in find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@cache
def _ctas() -> int:
    """One an SM of this host's GPUs. More than there are SMs would work too: tiles are claimed."""
    try:
        return int(getattr(jax.local_devices(backend="cuda")[0], "core_count", _SMS))
    except RuntimeError:  # there is none
        return _SMS
