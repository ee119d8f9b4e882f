"""Runs of a small DeepSeek-V3.2: warm-up, sparse phase, layouts, resume, packed documents."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.moe.hf.pieces import PieceReader
from phalanx.parallel.fault.signals import AGAIN
from tests.support.runs import DEEPSEEK, SMALL, exact, records, run, with_corpus
from tests.support.scheduling import slow

pytestmark = pytest.mark.dist

MODEL = [*DEEPSEEK[1:], "model=tiny_deepseek_v32", "model.attention.sparse.top_k=5"]
MODEL += ["model.attention.sparse.heads=2", "model.attention.sparse.dim=8"]
WARM_UP, SPARSE = (f"model.attention.sparse.phase={phase}" for phase in ("warm_up", "sparse"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on real text."""
    data = with_corpus(tmp_path_factory.mktemp("corpus"))
    return [*SMALL, *data, "data.split='90,10'", *MODEL]


def weights(folder: Path) -> dict[str, Any]:
    """Weights of a checkpoint, and moments of the optimizer."""
    reader = PieceReader(folder, lambda read, total: None)
    return {key: reader.read(key, (0, reader.shape(key)[0])) for key in reader.keys()}


def losses(folder: Path, name: str) -> list[float]:
    return [r[name] for r in records(folder / "run") if name in r]


@pytest.mark.parametrize("moments", ["fp32", "fp32_host", *slow("bf16_host")])
def test_the_warm_up_updates_the_indexer_alone(
    moments: str, corpus: list[str], tmp_path: Path
) -> None:
    command = [*corpus, WARM_UP, "run.steps=12", "run.save_interval=6", f"optim.moments={moments}"]
    (rank,) = run(1, [*command, "model.moe.router.bias_rate=0", f"run.dir={tmp_path}"])
    assert rank.code == 0, rank.err
    saved = tmp_path / "run/checkpoints"
    first, last = (weights(saved / f"step_{n:08d}") for n in (6, 12))
    moved = {key for key in first if not torch.equal(first[key], last[key])}
    assert moved and all(".indexer." in key for key in moved), sorted(moved)
    assert len(moved) == sum(".indexer." in key for key in first)
    found = losses(tmp_path, "balance/indexer_loss")
    assert len(found) == 12 and found[-1] < 0.8 * found[0]


def test_a_run_learns_and_goes_on_bit_for_bit(corpus: list[str], tmp_path: Path) -> None:
    """Experts over two ranks, in bf16, packed documents: 12 steps, and the last 6 of them again."""
    command = [*corpus, "data.document_mask=true", "run.eval_interval=6", "run.eval_batches=2"]
    command += ["run.steps=12", "run.save_interval=6", "parallel.expert=2"]
    command += ["model.moe.router.seq_aux_loss=0"]
    main, _ = run(2, [*command, f"run.dir={tmp_path / 'a'}"])
    assert main.code == 0, main.err
    saved = tmp_path / "a/run/checkpoints/step_00000006"
    repeated, _ = run(2, [*command, f"run.dir={tmp_path / 'b'}", f"run.resume={saved}"])
    assert "resumed from step 6" in repeated.out, repeated.err
    straight, again = (exact(records(tmp_path / name / "run")) for name in "ab")
    assert len(straight) == 12 and straight[6:] == again
    found = losses(tmp_path / "a", "loss")
    assert sum(found[-3:]) < sum(found[:3]) - 1.5
    assert losses(tmp_path / "a", "balance/indexer_loss")[6:] == losses(
        tmp_path / "b", "balance/indexer_loss"
    )


def test_ranks_and_stages_have_the_losses_of_one(corpus: list[str], tmp_path: Path) -> None:
    common = [*corpus, "precision=fp32", "parallel.capacity_factor=8", "data.micro_batch=2"]
    common += ["run.steps=3", "model.mtp_layers=0"]
    found = {}
    for name, world, sizes in (
        ("one", 1, []),
        ("experts", 2, ["parallel.expert=2"]),
        ("stages", 2, ["parallel.pipeline=2"]),
        ("recomputed", 1, ["run.recompute=full"]),
    ):
        ranks = run(world, [*common, *sizes, f"run.dir={tmp_path / name}"])
        assert all(rank.code == 0 for rank in ranks), ranks[0].err
        found[name] = records(tmp_path / name / "run")
    for name in ("experts", "stages", "recomputed"):
        for key, rel in (("loss", 2e-5), ("balance/indexer_loss", 2e-4), ("grad_norm", 2e-3)):
            values = [r[key] for r in found[name]]
            assert values == pytest.approx([r[key] for r in found["one"]], rel=rel), (name, key)


def test_a_checkpoint_of_the_warm_up_begins_the_sparse_phase(
    corpus: list[str], tmp_path: Path
) -> None:
    """And nothing else of the indexer may change, nor the phase within a run."""
    common = [*corpus, "run.save_interval=2"]
    (rank,) = run(1, [*common, WARM_UP, "run.steps=2", f"run.dir={tmp_path / 'a'}"])
    assert rank.code == 0, rank.err
    saved = tmp_path / "a/run/checkpoints/step_00000002"
    begin = [*common, f"run.resume={saved}", "run.steps=4", f"run.dir={tmp_path / 'b'}"]
    (rank,) = run(1, [*begin, SPARSE])
    assert rank.code == 0 and len(losses(tmp_path / "b", "balance/indexer_loss")) == 2, rank.err
    for changes, said in (
        (["model.attention.sparse.dim=16"], "model.attention.sparse"),
        (["model.attention.sparse={}"], "model.attention.sparse"),
    ):
        (rank,) = run(1, [*begin[:-1], f"run.dir={tmp_path / 'c'}", *changes])
        assert rank.code != 0 and said in rank.err and "Traceback" not in rank.err
    (rank,) = run(1, [*common, SPARSE, "run.steps=4", f"run.dir={tmp_path / 'a'}"])
    assert rank.code != 0 and "phase" in rank.err


def test_both_phases_in_one_run(corpus: list[str], tmp_path: Path) -> None:
    """As two of `run.phases`, in the way that the README has."""
    words = [word for word in corpus if not word.startswith("optim.decay_steps")]
    both = f"{{name:a,steps:2,overrides:['{WARM_UP}']}},{{name:b,steps:2,overrides:['{SPARSE}']}}"
    command = [*words, f"run.phases=[{both}]", f"run.dir={tmp_path}"]
    codes = [run(1, command)[0].code for _ in range(2)]
    assert codes == [AGAIN, 0]
    saved = tmp_path / "run/checkpoints"
    first, last = (weights(saved / f"step_{n:08d}") for n in (2, 4))
    moved = {key for key in first if not torch.equal(first[key], last[key])}
    assert any(".indexer." in key for key in moved)
    assert any(key.endswith("linear_q_up_proj.weight") for key in moved)
    assert len(losses(tmp_path, "balance/indexer_loss")) == 4


def test_with_all_keys_chosen_it_is_dense_attention(corpus: list[str], tmp_path: Path) -> None:
    """Losses and gradients are those of the same model without an indexer, in packed documents."""
    common = [*corpus, "precision=fp32", "run.steps=3", "data.document_mask=true"]
    common += ["model.moe.router.seq_aux_loss=0", "parallel.capacity_factor=8"]
    sides = {
        "sparse": ["model.attention.sparse.top_k=16", "model.attention.sparse.loss=0"],
        "dense": ["model.attention.sparse={}"],
    }
    found = {}
    for name, words in sides.items():
        (rank,) = run(1, [*common, *words, f"run.dir={tmp_path / name}"])
        assert rank.code == 0, rank.err
        found[name] = records(tmp_path / name / "run")
    for key, rel in (("loss", 1e-5), ("mtp_loss", 1e-5), ("grad_norm", 1e-4)):
        values = [[r[key] for r in found[name]] for name in sides]
        assert values[0] == pytest.approx(values[1], rel=rel), key
