"""Warnings about memory before a model is built."""

import contextlib
import io
from unittest import mock

import pytest
import torch

from phalanx.configs.load import load
from phalanx.moe.estimate.free_memory import FreeMemory
from phalanx.moe.estimate.memory import needed, with_fp8_weights
from phalanx.moe.training import memory_check
from phalanx.parallel.runtime import Runtime
from tests.moe.training.test_choices import KERNELS, on
from tests.support.distributed import run_distributed

HERE = Runtime(0, 1, 0, torch.device("cuda"))
FP8 = ["precision=fp8_block", "parallel.dispatch=local", "run.graph=off"]


def _warning(overrides: list[str], free: int) -> str:
    """Text on stderr for a GPU with so many bytes free."""
    room = mock.patch.object(
        memory_check, "free_gpu_memory", return_value=FreeMemory("GPU 0", free)
    )
    name = mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA H200")
    with room, name, contextlib.redirect_stderr(io.StringIO()) as told:
        memory_check.check_memory(load(overrides), HERE, KERNELS)
    return told.getvalue()


@pytest.mark.dist
def test_copies_that_auto_leaves_out_are_no_reason_to_warn() -> None:
    cfg = on("cuda", FP8, KERNELS, "local")
    least, most = (needed(with_fp8_weights(cfg, each), 1) for each in ("scratch", "resident"))
    assert least < most

    def told(*more: str, free: int) -> str:
        (text,) = run_distributed(_warning, 1, [*FP8, *more], int(free / 0.9) + 1)
        return text

    assert told(free=least) == ""
    assert "is expected to take" in told(free=least - 2**20)
    assert "is expected to take" in told("precision.weights=resident", free=most - 2**20)
