"""Choice of the implementation of linear attention."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.extras.linear_attention.fla import FLASH_LINEAR_ATTENTION
from phalanx.kernels.registry import Facts, resolve

CPU = Facts("cpu", None, torch.float32, packages=frozenset())
H200 = Facts("cuda", (9, 0), torch.bfloat16, packages=frozenset({"triton"}))
WITH_FLA = replace(H200, packages=frozenset({"triton", "flash_linear_attention"}))


@pytest.mark.parametrize(
    ("facts", "backend"),
    [
        (CPU, "torch"),
        (WITH_FLA, "fla"),
        (replace(WITH_FLA, capability=(8, 0)), "fla"),
        (replace(WITH_FLA, capability=(7, 5)), "torch"),
        (replace(WITH_FLA, dtype=torch.float32), "torch"),
        (H200, "torch"),
    ],
)
def test_best_backend(facts: Facts, backend: str) -> None:
    assert resolve("linear_attention", "auto", facts).backend == backend


def test_the_library_to_install_is_the_pinned_one() -> None:
    page = Path(__file__).resolve().parents[3] / "pyproject.toml"
    extras = tomllib.loads(page.read_text())["project"]["optional-dependencies"]
    assert FLASH_LINEAR_ATTENTION in extras["train"]
