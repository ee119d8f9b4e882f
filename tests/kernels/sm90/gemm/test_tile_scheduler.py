"""The raster of tiles and the size of the grid; claims and records are tested on a GPU."""

import itertools

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.gemm.tile_scheduler import raster
from phalanx.kernels.sm90.jit import launch as jit
from phalanx.kernels.sm90.jit.launch import persistent_ctas


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 28])
@pytest.mark.parametrize("band", [1, 8])
def test_raster_visits_every_tile_by_neighbours(rows, columns, band):
    visited = [raster(i, rows, columns, band, min) for i in range(rows * columns)]
    assert sorted(visited) == [(m, n) for m in range(rows) for n in range(columns)]
    for (m0, n0), (m1, n1) in itertools.pairwise(visited):
        assert abs(m1 - m0) <= 1 and abs(n1 - n0) <= band
    for (m0, n0), (m1, n1) in itertools.pairwise(visited):
        assert m0 == m1 or n1 // band == n0 // band  # a band starts in the row where one ended


def test_the_grid_leaves_the_margin_free(monkeypatch):
    monkeypatch.setattr(jit, "sms", lambda device: 132)
    device = torch.device("cuda")
    ctas = [persistent_ctas(device, LaunchOptions(m)) for m in (0, 1, 8, 131, 200)]
    assert ctas == [132, 131, 124, 1, 1]
    assert persistent_ctas(device, LaunchOptions(8).leaving(4)) == 120
    with pytest.raises(ValueError, match="sm_margin=-1"):
        LaunchOptions(-1)
