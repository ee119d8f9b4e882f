"""Epilogues in FP8: of `fc1_act`, with h in bf16 if it is saved, and of `fc2_dgrad_dact`.

They compute as those in bf16 do, and store rows in FP8 with a scale for 128 channels: of
activations, and of gradients of h.
"""

from dataclasses import dataclass
from typing import ClassVar

from phalanx.kernels.sm90.fp8.block_store import BlockStore
from phalanx.kernels.sm90.gemm.epilogue import Out
from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad
from phalanx.kernels.sm90.gemm.row_store import RowStore


@dataclass(frozen=True)
class Fp8Act(Act):
    """`Act` that stores a in e4m3."""

    row_store: ClassVar[type[RowStore]] = BlockStore


@dataclass(frozen=True)
class Fp8ActGrad(ActGrad):
    """`ActGrad` that stores dh and a in FP8, a in e4m3."""

    grad_format: str = "e4m3"  # format of dh

    row_store: ClassVar[type[RowStore]] = BlockStore

    @property
    def outputs(self) -> tuple[Out, ...]:
        return Out("dh", self.loaded, fp8=self.grad_format), Out("a")
