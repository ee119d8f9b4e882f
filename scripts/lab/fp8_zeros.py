#!/usr/bin/env python
"""Share of the numbers quantised to FP8 in training that become zero.

    python scripts/lab/fp8_zeros.py OVERRIDES

Trains like train.py, with kernels=torch and precision=fp8_block (whose operands have the bytes of
the fused kernels) and without a graph, and counts on rank 0 the numbers that quantising rows to FP8
turns into zero:

  x     inputs of experts and of other linear layers
  a     activations of experts, inputs of fc2
  dy    gradients of outputs
  dh    gradients before the activation of experts

All steps of the run are counted: to examine a trained model, resume its checkpoint for a few steps.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from phalanx import train
from phalanx.kernels.expert_mlp import backend as expert_backends
from phalanx.kernels.expert_mlp import fp8
from phalanx.kernels.expert_mlp.calls import Rows
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.quantize.blocks import Quantized

ADDED = ("kernels=torch", "precision=fp8_block", "run.graph=off")
_MAGNITUDE = 0x7F  # bit mask of an FP8 number without its sign


class Zeros:
    """Counts per operand: numbers that were not zero, and those that are zero in FP8."""

    def __init__(self) -> None:
        self._some, self._lost = Counter[str](), Counter[str]()

    def add(self, operand: str, x: Tensor, data: Tensor) -> None:
        """Count a matrix `x` and its FP8 bytes `data`."""
        some = (x != 0) & x.isfinite()  # NaN and infinity are not counted
        lost = some & (data.view(torch.uint8) & _MAGNITUDE == 0)
        self._some[operand] += int(some.sum())
        self._lost[operand] += int(lost.sum())

    @property
    def shares(self) -> dict[str, float]:
        return {name: self._lost[name] / some for name, some in self._some.items() if some}

    def table(self) -> str:
        lines = [f"{name:4}{share:12.4%}" for name, share in self.shares.items()]
        return "\n".join(("of numbers that were not zero, in FP8 are", *lines))


class Counting(fp8.EmulatedFP8):
    """The emulated recipe, which reports to `zeros` what it quantises."""

    zeros: Zeros

    def quantize(self, x: Rows, *, gradient: bool = False) -> Quantized:
        quantized = super().quantize(x, gradient=gradient)
        if isinstance(x, Tensor):
            self.zeros.add("dy" if gradient else "x", x, quantized.data)
        return quantized

    def _activations(self, a_SF: Tensor, plan: ExpertPlan) -> Quantized:
        quantized = super().quantize(a_SF)
        return self._of_experts("a", a_SF, quantized, plan)

    def _hidden_gradient(self, dh_SH: Tensor, parts: int, plan: ExpertPlan) -> Quantized:
        quantized = super()._hidden_gradient(dh_SH, parts, plan)
        return self._of_experts("dh", dh_SH, quantized, plan)

    def _of_experts(
        self, operand: str, x: Tensor, quantized: Quantized, plan: ExpertPlan
    ) -> Quantized:
        rows = int(plan.offsets[-1])  # rows after them are uninitialized
        self.zeros.add(operand, x[:rows], quantized.data[:rows])
        return quantized


@contextmanager
def counting() -> Iterator[Zeros]:
    """Count all that `kernels=torch precision=fp8_block` quantises in this process."""
    zeros = Zeros()

    def counting_backend(*args: Any) -> Counting:
        backend = Counting(*args)
        backend.zeros = zeros
        return backend

    expert_backends.provider.cache_clear()
    try:
        with mock.patch.object(fp8, "EmulatedFP8", counting_backend):
            yield zeros
    finally:
        expert_backends.provider.cache_clear()


def main(argv: Sequence[str]) -> int:
    """Command line. Returns the exit code of the run."""
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0 if argv else 2
    with counting() as zeros:
        code = train.main([*argv, *ADDED])
    if not code and os.environ.get("RANK", "0") == "0":
        print(zeros.table())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
