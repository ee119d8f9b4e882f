"""Runs of the trainer with block-sparse experts."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras.block_sparse.runs import HALF, MODEL, Multiplied, watched
from tests.support.runs import exact, records, run

pytestmark = pytest.mark.dist

FP32 = ["precision=fp32", "parallel.capacity_factor=8"]
KINDS = {
    "whole": (1, [*FP32, "parallel.distributed_optimizer=false", "optim.ema=0.9"]),
    "sharded": (2, ["parallel.expert=1", "optim.weight_decay=0.5"]),
    "bf16": (2, ["parallel.expert=1", "optim.moments=bf16", "optim.ema=0.9", "model.bias=true"]),
    "fp8": (1, ["precision=fp8_block"]),
}
NAMES = {
    "whole": {"weight", "main", "exp_avg", "exp_avg_sq", "ema"},
    "sharded": {"weight", "main", "exp_avg", "exp_avg_sq"},
    "bf16": {"weight", "main", "exp_avg", "exp_avg_sq", "remainder", "ema"},
    "fp8": {"weight", "main", "exp_avg", "exp_avg_sq"},
}


def steps(folder: Path, name: str = "run") -> list[dict[str, Any]]:
    return [r for r in records(folder / name) if "loss" in r]


@pytest.mark.parametrize("kind", KINDS)
def test_dead_blocks_are_zeros_after_every_step(kind: str, tmp_path: Path) -> None:
    ranks, more = KINDS[kind]
    if kind == "fp8":
        more = [*more, "model.hidden=128", "model.moe.ffn=256"]
    command = [*MODEL, HALF, *more, "run.steps=12", f"run.dir={tmp_path}"]
    ended = run(ranks, [*command, "run.save_interval=-1"], watched)
    assert {r.code for r in ended} == {0}, ended[0].err
    for rank in ended:
        seen = rank.seen
        assert seen["wrong"] == [] and seen["names"] == NAMES[kind]
        counts = [sorted({int(n) for m in of for n in m.sum((1, 2))}) for of in seen["masks"]]
        blocks = 8 if kind == "fp8" else 6
        assert counts[0] == [blocks] and counts[5:] == [[blocks // 2]] * 7
        assert all(len(each) == 1 for each in counts)
        assert seen["wanted"] == list(range(1, 10))  # masks stay after step 9
        flat = [torch.cat([m.flatten() for m in of]) for of in seen["masks"]]
        assert not torch.equal(flat[4], flat[8]) and torch.equal(flat[8], flat[-1])
        assert any((b & ~a).any() for a, b in pairwise(flat))  # some have grown
        first = [torch.cat([m.flatten() for m in of]) for of in ended[0].seen["masks"]]
        assert torch.equal(torch.stack(flat), torch.stack(first))
    losses = [r["loss"] for r in steps(tmp_path)]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_a_run_is_a_dense_one_whose_weights_are_multiplied_by_masks(tmp_path: Path) -> None:
    common = [*MODEL, *FP32, "parallel.distributed_optimizer=false", "run.steps=10"]
    common += ["run.save_interval=-1", "optim.clip_grad=0.5"]
    common += ["kernels.gradient_accumulation_fusion=false"]  # products are no parameters
    (sparse,) = run(1, [*common, HALF, f"run.dir={tmp_path / 'a'}"], watched)
    assert sparse.code == 0, sparse.err
    torch.save(sparse.seen["masks"], tmp_path / "masks.pt")
    (dense,) = run(1, [*common, f"run.dir={tmp_path / 'b'}"], Multiplied(tmp_path / "masks.pt"))
    assert dense.code == 0, dense.err
    for key in ("loss", "grad_norm"):
        ours, theirs = ([r[key] for r in steps(tmp_path / x)] for x in "ab")
        assert ours == pytest.approx(theirs, rel=1e-5), key
    for got, want in zip(sparse.seen["ended"], dense.seen, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_run_goes_on_bit_for_bit_in_its_masks(tmp_path: Path) -> None:
    """With two data-parallel ranks: 12 steps, and the last 6 of them again."""
    command = [*MODEL, HALF, "parallel.expert=1", "run.steps=12", "run.save_interval=6"]
    straight = run(2, [*command, f"run.dir={tmp_path / 'a'}"], watched)
    assert straight[0].code == 0, straight[0].err
    saved = tmp_path / "a/run/checkpoints/step_00000006"
    again = run(2, [*command, f"run.dir={tmp_path / 'b'}", f"run.resume={saved}"], watched)
    assert "resumed from step 6" in again[0].out, again[0].err
    first, second = (exact(steps(tmp_path / x)) for x in "ab")
    assert len(first) == 12 and first[6:] == second
    for one, other in zip(straight, again, strict=True):
        for a, b in zip(one.seen["masks"][6:], other.seen["masks"], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert again[0].seen["wanted"] == [1, 7, 8, 9]  # 1 before the checkpoint is read


def test_expert_and_data_parallel_ranks_train_one_model_and_layouts_change(tmp_path: Path) -> None:
    common = [*MODEL, *FP32, HALF, "run.steps=8", "run.save_interval=4", "optim.eps=1e-5"]
    runs = {
        "one": run(1, [*common, f"run.dir={tmp_path / 'one'}"], watched),
        "experts": run(2, [*common, f"run.dir={tmp_path / 'experts'}"], watched),
        "data": run(2, [*common, "parallel.expert=1", f"run.dir={tmp_path / 'data'}"], watched),
    }
    saved = tmp_path / "experts/run/checkpoints/step_00000004"
    moved = [*common, f"run.dir={tmp_path / 'moved'}", f"run.resume={saved}"]
    runs["moved"] = run(1, moved, watched)
    for name, ranks in runs.items():
        assert {r.code for r in ranks} == {0}, (name, ranks[0].err)
    (one,) = runs["one"]
    for name in ("experts", "data", "moved"):
        begin = 4 if name == "moved" else 0
        for key, rel in (("loss", 2e-5), ("grad_norm", 2e-3)):
            want = [r[key] for r in steps(tmp_path / "one")][begin:]
            assert [r[key] for r in steps(tmp_path / name)] == pytest.approx(want, rel=rel), name
        for step, want in enumerate(one.seen["masks"][begin:]):
            of_ranks = [rank.seen["masks"][step] for rank in runs[name]]
            if name == "experts":
                got = [torch.cat(parts) for parts in zip(*of_ranks, strict=True)]
            else:
                got = of_ranks[-1]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (name, step)


def test_a_dense_checkpoint_begins_a_sparse_run_and_the_other_way_round(tmp_path: Path) -> None:
    common = [*MODEL, "run.save_interval=4"]
    (dense,) = run(1, [*common, "run.steps=4", f"run.dir={tmp_path / 'dense'}"])
    assert dense.code == 0, dense.err
    start = tmp_path / "dense/run/checkpoints/step_00000004"
    given = [*common, HALF, "run.steps=16", f"run.dir={tmp_path / 'sparse'}", f"run.resume={start}"]
    (sparse,) = run(1, given, watched)
    assert sparse.code == 0, sparse.err
    assert sparse.seen["wrong"] == []
    living = [int(of[0][0].sum()) for of in sparse.seen["masks"]]
    # A schedule of the twelve steps that are left: from its first step to its sixth.
    assert living[:2] == [6, 5] and living[5:] == [3] * 7
    back = tmp_path / "sparse/run/checkpoints/step_00000012"
    given = [*common, "run.steps=14", f"run.dir={tmp_path / 'back'}", f"run.resume={back}"]
    (again,) = run(1, given)
    assert again.code == 0 and "resumed from step 12" in again.out, again.err
    fewer = [*common, "model.variants=[blocks64:25]", "run.steps=14", f"run.resume={back}"]
    (late,) = run(1, [*fewer, f"run.dir={tmp_path / 'late'}"], watched)
    assert late.code == 0 and late.seen["wrong"] == [], late.err
    assert [{int(n) for m in of for n in m.sum((1, 2))} for of in late.seen["masks"]] == [{2}] * 2
    more = [*common, "model.variants=[blocks64:75]", "run.steps=14", f"run.resume={back}"]
    (grown,) = run(1, [*more, f"run.dir={tmp_path / 'grown'}"])
    assert grown.code and "set it to blocks64:50" in grown.err, grown.err
    assert "3 of 6 blocks that live in the checkpoint" in grown.err and "Traceback" not in grown.err
    refused = [*common, "run.steps=20", f"run.dir={tmp_path / 'sparse'}"]
    (other,) = run(1, refused)
    assert other.code == 2 and "model.variants" in other.err


def test_a_skipped_step_changes_no_mask(tmp_path: Path) -> None:
    given = [*MODEL, HALF, "run.steps=8", "run.bad_steps=skip", "run.inject=[nan@3]"]
    (ended,) = run(1, [*given, "run.save_interval=-1", f"run.dir={tmp_path}"], watched)
    assert ended.code == 0 and "skipped" in ended.out, ended.err
    assert len(ended.seen["masks"]) == 7 and ended.seen["wrong"] == []
    assert {int(n) for m in ended.seen["masks"][-1] for n in m.sum((1, 2))} == {3}


def test_a_sparse_checkpoint_is_exported_averaged_and_writes_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    from phalanx.scripts import checkpoint, convert_hf, sample

    command = [*MODEL, "model.moe.dense_layers=0", HALF, "run.save_interval=6"]
    (ended,) = run(1, [*command, "run.steps=12", f"run.dir={tmp_path}"], watched)
    assert ended.code == 0, ended.err
    folder = tmp_path / "run/checkpoints/step_00000012"
    given = [str(tmp_path / "run"), "--prompt", "def ", "--tokens", "3", "--device", "cpu"]
    assert sample.main(given) == 0 and "def " in capsys.readouterr().out
    assert convert_hf.main(["export", str(folder), str(tmp_path / "hf")]) == 0
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    weights = load_file(file)
    gate = next(v for k, v in weights.items() if "experts.0" in k and tuple(v.shape) == (192, 128))
    blocks = gate.float().unflatten(0, (3, 64)).unflatten(2, (2, 64)).abs().sum((1, 3))
    assert int((blocks > 0).sum()) == 3
    assert "block_masks" not in json.dumps(sorted(weights))
    mean = tmp_path / "mean"
    earlier = tmp_path / "run/checkpoints/step_00000006"
    assert checkpoint.main(["average", str(earlier), str(folder), "--out", str(mean)]) == 0
    begun = [*command, "run.steps=2", f"run.dir={tmp_path / 'b'}", f"run.resume={mean}"]
    (again,) = run(1, begun, watched)
    assert again.code == 0 and again.seen["wrong"] == [], again.err
