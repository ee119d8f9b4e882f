"""The part of nvidia-cudnn-frontend that `extras.blackwell` calls, in torch, on any device.

Each wrapper has the signature of version 1.32.0, rejects the same arguments (shapes, strides, types
and alignment; the contract tests compare this with the package if it is installed) and computes the
result of its kernel in fp32. Output that a kernel does not write is NaN, and input that it must not
read, rows after the last offset, is not read. `CALLS` counts calls.
"""

import os
from collections import Counter

from tests.support.fake_cudnn.glu import (
    grouped_gemm_dglu_wrapper_sm100 as _dglu,
)
from tests.support.fake_cudnn.glu import grouped_gemm_glu_wrapper_sm100 as _glu
from tests.support.fake_cudnn.plain import (
    grouped_gemm_quant_wrapper_sm100 as _quant,
)
from tests.support.fake_cudnn.plain import (
    grouped_gemm_wgrad_wrapper_sm100 as _wgrad,
)
from tests.support.fake_cudnn.plain import grouped_gemm_wrapper_sm100 as _plain

__version__ = "1.32.0"

CALLS: Counter[str] = Counter()
"""Calls by name, and by name and the SM margin in the environment."""


def _counted(function):
    def run(*args, **kwargs):
        CALLS[function.__name__] += 1
        CALLS[function.__name__, os.getenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN")] += 1
        return function(*args, **kwargs)

    run.__wrapped__ = function
    return run


grouped_gemm_glu_wrapper_sm100 = _counted(_glu)
grouped_gemm_dglu_wrapper_sm100 = _counted(_dglu)
grouped_gemm_wrapper_sm100 = _counted(_plain)
grouped_gemm_quant_wrapper_sm100 = _counted(_quant)
grouped_gemm_wgrad_wrapper_sm100 = _counted(_wgrad)
