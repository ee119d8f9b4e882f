"""Block-sparse experts on one Hopper GPU: fused kernels are the torch backend, graphs are eager."""

import json
from pathlib import Path

import pytest

from phalanx.moe.hf.pieces import PieceReader
from tests.end_to_end.test_train_gpu import (
    GRAPH,
    RUNS,
    _hopper,
    check_fused_and_captured,
    train_side_by_side,
)

pytestmark = pytest.mark.gpu

__all__ = ["_hopper"]

MODEL = ["model=tiny", "model.hidden=256", "model.moe.ffn=256", "model.attention.head_dim=64"]


@pytest.mark.parametrize("more", [[], ["optim.moments=bf16", "optim.ema=0.9"]])
@pytest.mark.parametrize("variants", ["[blocks64:25]", "[blocks128:50]"])
def test_fused_and_captured_steps(variants: str, more: list[str], tmp_path: Path) -> None:
    """Masks change after 15 steps of 20, most of which are replays of two graphs."""
    common = [*MODEL, *more, f"model.variants={variants}", "parallel.capacity_factor=8"]
    common += ["run.steps=20", "run.save_interval=0"]
    # From the third step on a block of nearly equal norm may be another one.
    same = ("loss", "grad_norm", "load_max")
    check_fused_and_captured(tmp_path, common, same=same, near=2)
    for name in RUNS:
        _check(next((tmp_path / name).rglob("step_00000020")), variants)


@pytest.mark.parametrize("precision", ["precision=fp8_block"])
def test_fp8_copies_follow(precision: str, tmp_path: Path) -> None:
    common = [*MODEL, "model.variants=[blocks128:50]", precision, "kernels=fused"]
    common += ["parallel.capacity_factor=8", "run.steps=20", "run.save_interval=0"]
    eager, graph = train_side_by_side(
        tmp_path, {"eager": common, "graph": [*common, GRAPH]}
    ).values()
    for name in ("loss", "grad_norm"):
        assert [s[name] for s in graph] == [s[name] for s in eager], name
    for name in ("eager", "graph"):
        _check(next((tmp_path / name).rglob("step_00000020")), "[blocks128:50]")


def _check(checkpoint: Path, variants: str) -> None:
    """Masks of a checkpoint have the number of blocks, and weights and states are zeros in dead."""
    name, _, percent = variants.strip("[]").partition(":")
    block = int(name.removeprefix("blocks"))
    blocks = (256 // block) ** 2
    reader, seen = PieceReader(checkpoint, lambda done, total: None), 0
    masks = [key for key in reader.keys() if ".block_masks." in key and "living" in key]
    for key in masks:
        layer, _, matrix = key.partition(f"block_masks.{block}.living_")
        living = reader.read(key, (0, reader.shape(key)[0])).bool()
        assert set(living.sum((1, 2)).tolist()) == {max(1, round(blocks * int(percent) / 100))}
        weight = f"{layer}experts.linear_{matrix}.weight"
        for tensor in [k for k in reader.keys() if k.endswith(weight)]:
            values = reader.read(tensor, (0, reader.shape(tensor)[0]))
            parts = values.double().unflatten(1, (-1, living.shape[1], block))
            squares = parts.unflatten(4, (living.shape[2], block)).square().sum((1, 3, 5))
            assert ((squares > 0) <= living).all(), json.dumps([tensor, variants])
            seen += 1
    assert seen >= 3 * len(masks) > 0  # the weight and both moments, at least
