"""Waves of experts: all of them, in order, the first one smallest."""

import pytest

pytest.importorskip("cutlass")

from kernels.sm90.waves import MAX_WAVES, wave_of


@pytest.mark.parametrize("waves", [1, 2, 5, MAX_WAVES])
@pytest.mark.parametrize("local", [1, 2, 3, 16, 31, 32, 100, 512])
def test_waves_grow(local: int, waves: int) -> None:
    found = [wave_of(expert, local, waves) for expert in range(local)]
    assert found == sorted(found) and found[0] == 0 and found[-1] < waves
    if local >= 2**waves:
        sizes = [found.count(wave) for wave in range(waves)]
        assert found[-1] == waves - 1 and sizes == sorted(sizes)
        assert sizes[0] == -(-local // (2**waves - 1))


@pytest.mark.parametrize("waves", [1, 3, 5])
def test_bounds_are_those_that_push_compares_with(waves: int) -> None:
    local = 13
    for expert in range(local):
        scaled, wave = expert * (2**waves - 1), wave_of(expert, local, waves)
        begin = local * (2**wave - 1)
        assert begin <= scaled < 2 * begin + local
