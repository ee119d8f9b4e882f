"""Waves of experts: all of them, in order, the first one smallest."""

from itertools import pairwise

import pytest

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.exchange.peer_buffers import wave_begins
from tests.kernels.sm90 import simt

WAVES = simt.load("phalanx.kernels.sm90.exchange.waves")
MAX_WAVES, parts_before, wave_of = WAVES.MAX_WAVES, WAVES.parts_before, WAVES.wave_of


@pytest.mark.parametrize("waves", [1, 2, 5, 7, MAX_WAVES])
@pytest.mark.parametrize("local", [1, 2, 3, 16, 31, 32, 100, 512])
def test_waves_grow(local: int, waves: int) -> None:
    found = [wave_of(expert, local, waves) for expert in range(local)]
    assert found == sorted(found) and found[0] == 0 and found[-1] < waves
    if waves <= local:
        of_waves = enumerate(pairwise(wave_begins(local, waves)))
        assert [wave for wave, experts in of_waves for _ in range(*experts)] == found
    parts = [
        parts_before(w + 1, local, waves) - parts_before(w, local, waves) for w in range(waves)
    ]
    assert parts == sorted(parts) and max(parts) <= 6
    if local >= parts_before(waves, local, waves):
        sizes = [found.count(wave) for wave in range(waves)]
        assert found[-1] == waves - 1 and sizes[0] == -(-local // sum(parts))
        for size, part in zip(sizes, parts, strict=True):
            assert abs(size - local * part / sum(parts)) <= 1


@pytest.mark.parametrize("local", range(1, MAX_WAVES + 1))
def test_an_expert_is_a_wave_where_there_are_few(local: int) -> None:
    assert [wave_of(expert, local, local) for expert in range(local)] == list(range(local))
