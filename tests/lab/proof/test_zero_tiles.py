"""zero_tiles.py: shares of tiles in each order, and those of a small trained model."""

import json
from pathlib import Path

import pytest
import torch

from phalanx.scripts import prepare_data
from phalanx.scripts.lab.proof import zero_tiles
from phalanx.scripts.lab.proof.zero_tiles import CHANNELS, ORDERS, ROWS, of_expert
from tests.support import tiny_runs


def test_orders_find_what_a_permutation_hid() -> None:
    """Two kinds of rows that use one half of the channels each, shuffled."""
    generator = torch.Generator().manual_seed(0)
    some = torch.zeros(4 * ROWS, 4 * CHANNELS, dtype=torch.bool)
    some[: 2 * ROWS, : 2 * CHANNELS] = True
    some[2 * ROWS :, 2 * CHANNELS :] = True
    some = some[torch.randperm(len(some), generator=generator)]
    some = some[:, torch.randperm(some.shape[1], generator=generator)]
    shares = of_expert(some)
    assert shares["zeros"] == 0.5 and shares["as they are"] == shares["channels"] == 0
    assert shares["both"] == shares["tile's channels"] == 0.5
    assert zero_tiles.gain(shares) == pytest.approx(5 / 12)


def test_dead_channels_are_skipped_in_their_order() -> None:
    some = torch.ones(ROWS, 2 * CHANNELS, dtype=torch.bool)
    some[:, ::2] = False
    shares = of_expert(some)
    assert shares["as they are"] == 0 and shares["channels"] == 0.5


def test_rows_at_the_end_are_left_out() -> None:
    assert of_expert(torch.ones(ROWS - 1, CHANNELS, dtype=torch.bool)) == {"weight": 0.0}
    assert of_expert(torch.zeros(ROWS + 1, CHANNELS, dtype=torch.bool))["as they are"] == 1


@pytest.mark.dist
def test_a_trained_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("int f(void) { return 1; }\n" * 400)
    prefix = tmp_path / "text"
    given = [str(text), "--bytes", "--workers", "1", "--output", str(prefix)]
    assert prepare_data.main(given) == 0
    more = ["model.moe.activation=squared_relu", "model.moe.ffn=64", "run.steps=2"]
    run = tiny_runs.train(tmp_path, "run", 1, *more)
    out = tmp_path / "zeros.json"
    done = tiny_runs.command(
        zero_tiles.main, run, prefix, "--tokens", 2048, "--json", out, "--device", "cpu"
    )
    assert done.code == 0, done.err
    (report,) = json.loads(out.read_text())["steps"]
    for layer in report["layers"]:
        assert 0 < layer["zeros"] < 1 and all(0 <= layer[order] < 1 for order in ORDERS)
    assert "tile's channels" in done.out
