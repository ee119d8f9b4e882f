"""A run with two checkpoints, made once."""

import shutil
from pathlib import Path

import pytest

from tests.parallel.checkpoint.checkpoints import two_checkpoints
from tests.support.distributed import run_distributed


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    run_distributed(two_checkpoints, 1, folder)
    return folder


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """A copy of a run with the checkpoints of steps 1 and 2."""
    return Path(shutil.copytree(template, tmp_path / "checkpoints"))
