"""Runs of a module over several GPUs, trained once for all of its tests."""

import pytest

from tests.support.gpu_runs import Outcome, run_on_hopper


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """Outcomes by name of the module's `CASES`, which have its `SECONDS` to end."""
    module = request.module
    return run_on_hopper(module.CASES, tmp_path_factory.mktemp("runs"), module.SECONDS)
