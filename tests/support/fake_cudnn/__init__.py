"""The part of nvidia-cudnn-frontend that `extras.blackwell` calls, in torch, on any device.

Each wrapper has the signature of version 1.32.0, rejects the same arguments (shapes, strides, types
and alignment; the contract tests compare this with the package if it is installed) and computes the
result of its kernel in fp32. Output that a kernel does not write is NaN, and input that it must not
read, rows after the last offset, is not read. `CALLS` counts calls.
"""

import os
from ast import literal_eval
from collections import Counter
from collections.abc import Callable
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

from tests.support.fake_cudnn import wrappers

__version__ = "1.32.0"

CALLS: Counter[Any] = Counter()
"""Calls by name, and by name and the SM margin in the environment."""

_TILES = "mma_tiler_mn=(256,256) cluster_shape_mn=None"
_ACT = """linear_offset=None geglu_alpha=1.702 glu_clamp_max=7.0 glu_clamp_min=-7.0 situ_beta1=4.0
    situ_beta2=25.0"""
_DYNAMIC = "use_dynamic_sched=False use_single_group_runtime_offsets=False current_stream=None"
_PARAMETERS = {
    wrappers.glu: f"""a_tensor sfa_tensor padded_offsets alpha_tensor b_tensor=None sfb_tensor=None
        bias_tensor=None b_ptrs=None sfb_ptrs=None n=None b_dtype=None b_major='k'
        norm_const_tensor=None prob_tensor=None acc_dtype=None c_dtype=None d_dtype=None
        cd_major='n' {_TILES} sf_vec_size=16 vector_f32=False m_aligned=256 discrete_col_sfd=False
        act_func='swiglu' {_ACT} {_DYNAMIC} generate_c=False sf_fp8_dtype_override=None *
        scheduler_counter_tensor=None""",
    wrappers.dglu: f"""a_tensor c_tensor sfa_tensor padded_offsets alpha_tensor beta_tensor
        prob_tensor dprob_tensor b_tensor=None sfb_tensor=None generate_dbias=False b_ptrs=None
        sfb_ptrs=None n=None b_dtype=None b_major='k' norm_const_tensor=None acc_dtype=None
        d_dtype=None cd_major='n' {_TILES} sf_vec_size=16 sf_fp8_dtype_override=None
        vector_f32=False m_aligned=256 discrete_col_sfd=False act_func='dswiglu' {_ACT}
        epilogue_op=None {_DYNAMIC} round_dgrad_to_input_dtype=False activation_tensor=None
        deterministic=False""",
    wrappers.plain: f"""a_tensor padded_offsets alpha_tensor b_tensor=None bias_tensor=None
        b_ptrs=None n=None b_dtype=None b_major='k' prob_tensor=None acc_dtype=None c_dtype=None
        d_dtype=None c_tensor=None d_tensor=None cd_major='n' {_TILES} vector_f32=False
        m_aligned=256 generate_c=False use_dynamic_sched=False current_stream=None""",
    wrappers.quant: f"""a_tensor sfa_tensor padded_offsets alpha_tensor b_tensor=None
        sfb_tensor=None bias_tensor=None b_ptrs=None sfb_ptrs=None n=None b_dtype=None b_major='k'
        norm_const_tensor=None prob_tensor=None row_scale_tensor=None acc_dtype=None d_dtype=None
        d_tensor=None cd_major='n' {_TILES} sf_vec_size=16 sf_fp8_dtype_override=None
        vector_f32=False m_aligned=256 discrete_col_sfd=False {_DYNAMIC} * generate_amax=True
        scheduler_counter_tensor=None""",
    wrappers.wgrad: f"""a_tensor b_tensor sfa_tensor sfb_tensor offsets_tensor output_mode='dense'
        wgrad_tensor=None wgrad_ptrs=None global_scale_a=None global_scale_b=None acc_dtype=None
        wgrad_dtype=None {_TILES} sf_vec_size=16 sf_fp8_dtype_override=None
        accumulate_on_output=False input_order='tensor2d' current_stream=None *
        descriptor_workspace=None""",
}
"""Parameters of each wrapper in order; those after a star are given by name."""


def _signature(text: str) -> Signature:
    kind, parameters = Parameter.POSITIONAL_OR_KEYWORD, []
    for word in text.split():
        name, _, default = word.partition("=")
        if name == "*":
            kind = Parameter.KEYWORD_ONLY
            continue
        value = literal_eval(default) if default else Parameter.empty
        parameters.append(Parameter(name, kind, default=value))
    return Signature(parameters)


def _wrapper(name: str, compute: Callable[[SimpleNamespace], Any]) -> Callable[..., Any]:
    signature = _signature(_PARAMETERS[compute])

    def run(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        CALLS[name, os.getenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN")] += 1
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {key.removesuffix("_tensor"): value for key, value in bound.arguments.items()}
        return compute(SimpleNamespace(**given))

    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def _named(compute: Callable[[SimpleNamespace], Any], middle: str) -> dict[str, Any]:
    name = f"grouped_gemm{middle}_wrapper_sm100"
    return {name: _wrapper(name, compute)}


globals().update(
    _named(wrappers.glu, "_glu")
    | _named(wrappers.dglu, "_dglu")
    | _named(wrappers.plain, "")
    | _named(wrappers.quant, "_quant")
    | _named(wrappers.wgrad, "_wgrad")
)
