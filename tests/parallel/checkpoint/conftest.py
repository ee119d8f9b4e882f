"""Training without an interruption, which runs that were killed are compared with."""

import pytest

from tests.parallel.checkpoint.checkpoints import build, train
from tests.support.distributed import run_distributed


def _uninterrupted() -> list[tuple[float, float]]:
    return train(*build(), 0, 3)


@pytest.fixture(scope="session")
def expected() -> list[tuple[float, float]]:
    """Losses and gradient norms of three steps."""
    return run_distributed(_uninterrupted, 1)[0]
