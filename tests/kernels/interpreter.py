"""Triton kernels on CPU tensors, run by Triton's interpreter in a separate process.

One interpreting process serves all test modules of a process, as its imports take seconds.
"""

import functools
import importlib
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.kernels.interpreter_speed import hasten


def interpret(module: str) -> None:
    """Call `interpreted` of a test module in the interpreting process, and raise its errors.

    Args:
        module: `__name__` of the caller.
    """
    _process().submit(_call, module).result(timeout=100)


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from triton.runtime import interpreter

    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_maxnumf = _maxnum
    interpreter.InterpreterBuilder.create_dot = _dot
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        """Convert loop bounds: scalars are one-element arrays, which numpy rejects as bounds."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    hasten()


def count_in_tensors(module: Any) -> None:
    """Make loops of a module's kernels count in tensors, like compiled ones, not in integers."""
    from triton.runtime.interpreter import interpreter_semantic

    def numbers(*bounds: Any) -> Any:
        return map(interpreter_semantic.to_tensor, range(*(b.__index__() for b in bounds)))

    module.range = numbers


def _maxnum(builder: Any, a: Any, b: Any) -> Any:
    """tl.maximum, which ignores NaN unless told to propagate it."""
    return builder.binary_op(a, b, np.fmax)


def _dot(builder: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
    """Product of matrices in any format; Triton's own multiplies the bits of bf16 as integers."""
    from triton.language import bfloat16
    from triton.runtime.interpreter import TensorHandle

    def wide(x: Any) -> Tensor:
        numbers = torch.from_numpy(np.ascontiguousarray(x.data))
        return (numbers.view(torch.bfloat16) if x.dtype.scalar == bfloat16 else numbers).float()

    return TensorHandle((wide(a) @ wide(b)).numpy() + total.data, total.dtype.scalar)


def _convert(x: np.ndarray, source: Any, target: Any, _: Any) -> np.ndarray:
    """Convert bits to another format as an NVIDIA GPU does: nearest even, FP8 saturates.

    Triton's own conversion truncates, and flushes denormals.
    """
    known = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
    }
    dtype = known[target.name]
    values = torch.from_numpy(np.ascontiguousarray(x)).view(known[source.name]).float()
    if dtype.itemsize == 1:
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    unsigned = getattr(torch, f"uint{8 * dtype.itemsize}")
    return values.to(dtype).view(unsigned).numpy()


def _call(module: str) -> None:
    importlib.import_module(module).interpreted()
