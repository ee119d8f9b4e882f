"""`hier` over the collective rail on two GPUs as two nodes, captured: replays, overflow, FP8."""

from pathlib import Path

import pytest

from tests.extras.between_nodes.rail_layer import LIMIT
from tests.parallel.dispatcher.symm_layer import SPECS
from tests.parallel.dispatcher.test_symm_gpu import compare, gpus

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).parent / "rail_layer.py"


def test_replays_and_reruns_equal_collectives_bit_for_bit() -> None:
    """In bf16, and with rows and experts in FP8."""
    if gpus() < 2:
        pytest.skip("needs two Hopper GPUs")
    compare(2, program=PROGRAM, least=2 * len(SPECS), timeout=LIMIT + 8)
