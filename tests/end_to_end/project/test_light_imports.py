"""Modules that a start does without, each of which takes from half a second to four."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.runs import TINY

API = ["import phalanx.kernels.api"]
FRAMEWORKS = ["megatron", "hydra", "omegaconf", "wandb", "transformer_engine"]
TRAIN = ["import sys", "from phalanx import train", "assert train.main(sys.argv[1:]) == 0"]


@pytest.mark.parametrize(
    ("code", "overrides", "without"),
    [
        (API, [], [*FRAMEWORKS, "torch._dynamo", "sympy", "triton", "cutlass"]),
        pytest.param(
            *(TRAIN, ["run.dry_run=true"]),
            ["megatron", "torch._dynamo", "sympy", "triton", "cutlass"],
            marks=pytest.mark.extras,
        ),
        (TRAIN, [*TINY, "data=synthetic", "run.steps=2"], ["torch._dynamo", "torch._inductor"]),
    ],
    ids=["kernels", "dry run", "run"],
)
def test_modules_that_are_not_imported(
    code: Sequence[str], overrides: Sequence[str], without: Sequence[str], tmp_path: Path
) -> None:
    code = [*code, f"import sys; print('found', *({{*{[*without]}}} & {{*sys.modules}}))"]
    overrides = [*overrides, f"run.dir={tmp_path}"] if overrides else []
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(code), *overrides], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].strip() == "found"
