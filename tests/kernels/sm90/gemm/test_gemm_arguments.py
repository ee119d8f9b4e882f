"""The grouped GEMMs refuse what they cannot do, and name it; tables choose tiles."""

import json

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.gemm.mainloop import Mainloop

OFFSETS = torch.tensor([0, 4, 8], dtype=torch.int32)
SWIGLU = Activation("swiglu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(columns=100), "columns=100: tiles have 128, 192 or 256"),
        (dict(columns=256, pingpong=True), "at most 128 x 192 accumulators"),
    ],
)
def test_impossible_tiles_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Mainloop(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_LNK": torch.zeros(2, 128, 96)}, r"w is \[2, 128, 96\]: .* multiples of 64"),
        ({"w_LNK": torch.zeros(128, 64)}, r"w must be \[L, N, K\]"),
        ({"bias_LN": torch.zeros(2, 128)}, "bias and scale"),
        ({}, "w must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_of_grouped_gemm(change, message):
    given = {"a": torch.zeros(8, 64), "w_LNK": torch.zeros(2, 128, 64), **change}
    with pytest.raises(ValueError, match=message):
        grouped_gemm(**given, offsets=OFFSETS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w1_LHD": torch.zeros(2, 128, 96)}, r"w1 is \[2, 128, 96\]: .* multiples of 64"),
        ({"w1_LHD": torch.zeros(2, 192, 64)}, r"w1 is \[2, 192, 64\]: 2 part.s. of N and 1 of K"),
        ({"w1_LHD": torch.zeros(2, 64, 128).mT}, "w1 must be contiguous"),
        ({}, "w1 must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_of_fc1_act(change, message):
    given = {"x": torch.zeros(8, 64), "w1_LHD": torch.zeros(2, 128, 64), **change}
    with pytest.raises(ValueError, match=message):
        fc1_act(**given, offsets=OFFSETS, act=SWIGLU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w2_LFD": torch.zeros(2, 64, 96).mT}, r"w2 is \[2, 96, 64\]: .* multiples of 64"),
        ({"w2_LFD": torch.zeros(2, 128, 64)}, "w2 must be the transpose of contiguous weights"),
        ({}, "w2 must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_of_fc2_dgrad_dact(change, message):
    given = {"dy": torch.zeros(8, 64), "w2_LFD": torch.zeros(2, 64, 128).mT, **change}
    with pytest.raises(ValueError, match=message):
        fc2_dgrad_dact(**given, h_SH=torch.zeros(8, 256), offsets=OFFSETS, act=SWIGLU)


def test_the_fastest_tile_is_chosen(tmp_path, monkeypatch):
    measured = {"grouped_gemm": {"pp192": 1.0, "co256": 1.05}, "fc1_act gathered": {"pp128": 1.0}}
    measured["fc1_act gathered, deep"] = {"co256": 1.0, "pp128": 1.18}
    monkeypatch.setattr(tiles, "PATH", tmp_path / "tiles.json")
    tiles.PATH.write_text(json.dumps(measured))
    tiles.table.cache_clear(), tiles.choose.cache_clear()
    plain, deep = dict(gather=False, transposed=True), dict(gather=True, transposed=False)
    try:
        assert tiles.choose("grouped_gemm", 1152, 64, **plain) == tiles.configured("pp192", **plain)
        assert tiles.choose("grouped_gemm", 256, 64, **plain) == tiles.configured("co256", **plain)
        # 96 columns of each half a tile, or 128
        assert tiles.choose("grouped_gemm", 96, 64, **plain, num_gate_parts=2).columns == 192
        assert tiles.choose("grouped_gemm", 128, 64, **plain, num_gate_parts=2).columns == 256
        assert tiles.choose("fc1_act", 256, 2880, **deep) == Mainloop(128, True, gather=True)
        assert tiles.choose("fc1_act", 256, 4096, **deep) == Mainloop(256, gather=True)
    finally:
        tiles.table.cache_clear(), tiles.choose.cache_clear()


@pytest.mark.parametrize(
    ("name", "gather"),
    [
        ("grouped_gemm", False),
        *((name, gather) for name in ("fc1_act", "fc2_dgrad_dact") for gather in (False, True)),
    ],
)
@pytest.mark.parametrize("depth", [64, 4096])
def test_the_table_is_complete(depth, gather, name):
    measured = tiles.table()[tiles.kind(name, gather=gather, depth=depth)]
    assert measured.keys() <= tiles.TILES.keys() and min(measured.values()) == 1.0
