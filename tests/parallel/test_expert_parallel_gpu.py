"""Layers of `ExpertParallelGroup` over `symm`, on two GPUs or in two processes on one."""

from pathlib import Path

import pytest

from tests.parallel.dispatcher.test_symm_gpu import compare, gpus

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("expert_parallel_ranks.py")


@pytest.mark.parametrize("one_gpu", [False, True])
def test_layers_equal_those_over_collectives_bit_for_bit(one_gpu: bool) -> None:
    if gpus() < 2 - one_gpu:
        pytest.skip("needs Hopper GPUs")
    out = compare(2, program=PROGRAM, least=21, one_gpu=one_gpu)
    assert out.count("equal:") == 21
