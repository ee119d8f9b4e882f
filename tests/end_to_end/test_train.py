"""Runs of the trainer: it learns, resumes bit for bit, stops when asked, and reports.

Small models of every kind on gloo ranks, in this session's pools; the real launcher is in
test_scripts.
"""

import gzip
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.runs import (
    DEEPSEEK,
    GPT_OSS,
    SMALL,
    Rank,
    before_step,
    exact,
    records,
    run,
    terminate,
    with_corpus,
)
from tests.support.sync_free import sync_free

pytestmark = pytest.mark.dist

MODELS = {
    "tiny": ["model=tiny", "model.attention.head_dim=8"],
    "tiny_gpt_oss": GPT_OSS,
    "tiny_deepseek": [*DEEPSEEK, "model.moe.router.bias_rate=0.01"],
}
FULL = ["tiny_gpt_oss", "tiny_deepseek"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on real text."""
    return [*SMALL, *with_corpus(tmp_path_factory.mktemp("corpus")), "data.split='90,10'"]


@contextmanager
def stopped(rank: int, *, at: int, only: int) -> Iterator[None]:
    """SIGTERM to one rank when a step begins."""
    if rank != only:
        yield
        return
    with before_step(at, terminate):
        yield


# --- learning, and what is told of it -------------------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param(FULL[0], marks=pytest.mark.slow), *FULL[1:]])
def full_run(
    request: pytest.FixtureRequest, corpus: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path, Rank]:
    """An uninterrupted run of six steps on two ranks, EP2: (overrides, run folder, rank 0)."""
    folder = tmp_path_factory.mktemp("whole")
    overrides = [*corpus, *MODELS[request.param], "run.steps=6", "kernels=torch"]
    more = ["run.eval_interval=3", "run.eval_batches=2", "run.profile=[2,3]", "run.save_interval=4"]
    main, other = run(2, [*overrides, *more, f"run.dir={folder}"])
    assert (main.code, other.code) == (0, 0)
    assert (other.out, other.err) == ("", "")
    return overrides, folder / "run", main


def test_a_run_tells_what_it_is_and_each_step(full_run: tuple[list[str], Path, Rank]) -> None:
    overrides, folder, main = full_run
    page, _, rest = main.out.partition("\n\nstep ")
    name = overrides[overrides.index("data.split='90,10'") + 1].partition("=")[2]
    read = [line.split()[1:] for line in page.splitlines() if line.startswith("  text ")]
    assert [row[:-3] for row in read] == [["training", "100.0%"], ["each", "validation", "100.0%"]]
    assert float(read[0][-1]) > 0
    for output in (
        "from scratch",
        f"{name}: ",
        "active per token",
        "expert           2  0, 1",
        "torch",
        "transport    alltoall ",
        "Kernels need CUDA, of which there is none here; left out: ",
        "overlap      off ",
    ):
        assert output in page
    rows = [line.split() for line in rest.splitlines()]
    steps = [row for row in rows if row and row[0].endswith("/6") and row[0][0].isdigit()]
    assert [row[0] for row in steps] == [f"{n}/6" for n in range(1, 7)]
    assert [float(row[1]) for row in steps] == [round(r["loss"], 4) for r in records(folder)]
    assert max(map(len, main.out.splitlines())) <= 130 + len(str(folder))
    assert f"saved: checkpoint of step 6 in {folder}/checkpoints" in main.out
    assert "done: step 6 after" in main.out


def test_every_step_is_recorded_once_and_validation_on_its_interval(
    full_run: tuple[list[str], Path, Rank],
) -> None:
    _, folder, main = full_run
    actual = records(folder)
    assert [r["step"] for r in actual] == [1, 2, 3, 4, 5, 6]
    for r in actual:
        assert 2 < r["loss"] < 7 and r["grad_norm"] > 0 and r["lr"] > 0
        assert r["tokens_per_second_per_gpu"] > 0 and 1 <= r["load_max"] <= 4
        assert ("valid_loss" in r) == (r["step"] in (3, 6))
        assert r["tokens"] == r["step"] * 8 * 16
    assert abs(actual[5]["valid_loss"] - actual[5]["loss"]) < 1
    assert main.out.count("-- validation loss") == 2


def test_a_profile_has_the_stages_of_the_data_flow(full_run: tuple[list[str], Path, Rank]) -> None:
    _, folder, main = full_run
    trace = folder / "trace_2_3.json.gz"
    assert f"wrote {trace}" in main.out
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [e.get("name") for e in events]
    flow = ("moe/route", "moe/dispatch", "moe/experts", "moe/combine", "attention/core")
    for stage in ("data", *flow, "optimizer"):
        assert names.count(stage) >= 2, stage
    assert names.count("optimizer") == 2  # one of each step of the window
    assert [names.count(f"step {n}") for n in (1, 2, 3, 4)] == [0, 1, 1, 0]
    assert ("moe/shared" in names) == ("deepseek" in main.out)


@pytest.mark.slow
def test_two_ranks_learn_real_text(corpus: list[str], tmp_path: Path) -> None:
    more = ["run.steps=40", "optim.decay_steps=40", f"run.dir={tmp_path}", "run.log_interval=5"]
    main, _ = run(2, [*corpus, *MODELS["tiny"], "data.global_batch=16", *more])
    actual = records(tmp_path / "run")
    assert main.code == 0 and [r["step"] for r in actual] == list(range(5, 45, 5))
    assert actual[-1]["loss"] < 3.2 < math.log(256) - 1
    assert actual[-1]["load_max"] < 3 and actual[-1]["dead_experts"] == 0


def test_what_was_not_asked_for_is_not_there(corpus: list[str], tmp_path: Path) -> None:
    more = ["run.steps=2", "run.save_interval=-1", f"run.dir={tmp_path}"]
    assert run(1, [*corpus, *MODELS["tiny"], *more])[0].code == 0
    actual = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert actual[:2] == ["run/config.yaml", "run/console.log"]
    assert actual[2].startswith("run/launches/") and actual[3:] == ["run/metrics.jsonl"]


# --- stopping and resuming ------------------------------------------------------------------------


def test_a_stopped_run_goes_on_bit_for_bit(
    full_run: tuple[list[str], Path, Rank], tmp_path: Path
) -> None:
    """A signal to one rank; then the same command again. Validation changes nothing either."""
    overrides, reference, _ = full_run
    command = [*overrides, f"run.dir={tmp_path}", "run.async_save=on"]
    first = run(2, command, partial(stopped, at=3, only=1))
    assert [r.code for r in first] == [0, 0] and first[0].err == ""
    assert "stopping after step 3: a signal asked for it" in first[0].out
    assert "stopped: step 3 after" in first[0].out
    assert exact(records(tmp_path / "run")) == exact(records(reference))[:3]

    repeated = run(2, command)
    assert [r.code for r in repeated] == [0, 0]
    assert "done: step 6, resumed from step 3, after" in repeated[0].out
    assert f"resumed from step 3: {tmp_path / 'run/checkpoints/step_00000003'}" in repeated[0].out
    assert exact(records(tmp_path / "run")) == exact(records(reference))

    # As another value of a sweep would find it.
    finished = run(2, [*command, "optim.lr=2e-2"])
    assert [r.code for r in finished] == [0, 0] and "resumed from" not in finished[0].out
    newest = tmp_path / "run/checkpoints/step_00000006"
    line = (
        f"-- nothing was left to do: {newest} is of step 6, and this run ends at step 6; a larger "
        "run.steps trains on, run.start_over=NOW or another run.name starts over\n"
    )
    timeless = partial(re.sub, r"start_over=[\d-]+", "start_over=NOW")
    assert timeless(finished[0].out).endswith(line) and "nothing was left" not in finished[1].out
    alone = run(1, [*command, "run.steps=3"])[0]
    assert (alone.code, timeless(alone.out)) == (0, line.replace("at step 6", "at step 3"))
    assert alone.err == ""
    assert exact(records(tmp_path / "run")) == exact(records(reference))


def test_an_extended_run_tells_of_its_learning_rate(corpus: list[str], tmp_path: Path) -> None:
    """A cosine at its end would rise again; a warning names the override that prevents it."""
    command = [*corpus, *MODELS["tiny"], "optim.decay_steps=0", f"run.dir={tmp_path}"]
    assert run(1, [*command, "run.steps=4"])[0].code == 0
    (risen,) = run(1, [*command, "run.steps=10", "run.save_interval=-1"])
    line = re.search(
        r"-- the learning rate of step 5 goes from (\S+) to (\S+), .*: set (.*) to", risen.out
    )
    assert line is not None and risen.code == 0
    rates = [r["lr"] for r in records(tmp_path / "run")]
    ended = rates[3]
    assert float(line[1]) == ended
    assert float(line[2]) == pytest.approx(rates[4], rel=1e-2) and rates[4] > 9 * ended
    (kept,) = run(1, [*command, "run.steps=10", "run.save_interval=-1", *line[3].split()])
    assert kept.code == 0 and "the learning rate" not in kept.out
    assert {r["lr"] for r in records(tmp_path / "run")[3:]} == {ended}


def test_a_run_can_start_from_the_checkpoint_of_another(
    full_run: tuple[list[str], Path, Rank], tmp_path: Path
) -> None:
    overrides, reference, _ = full_run
    saved = reference / "checkpoints/step_00000004"
    command = [*overrides, f"run.dir={tmp_path}"]
    main, _ = run(2, [*command, f"run.resume={saved}"])
    assert main.code == 0 and f"resumed from step 4: {saved}" in main.out
    assert exact(records(tmp_path / "run")) == exact(records(reference))[4:]

    # The same command goes on; another start is refused, unless a word asks for it.
    main, _ = run(2, [*command, f"run.resume={saved}"])
    assert main.code == 0 and f"-- run.resume={saved}: an earlier launch has started" in main.out
    assert "run/checkpoints/step_00000006 is of step 6" in main.out
    kept = (tmp_path / "run/config.yaml").read_bytes()
    main, _ = run(2, [*command, "run.resume=never", "run.steps=2"])
    (line,) = main.err.splitlines()
    assert main.code == 2 and f"run.resume=never: {tmp_path}/run has started from {saved}" in line
    assert (tmp_path / "run/config.yaml").read_bytes() == kept
    word = next(word for word in line.split() if word.startswith("run.start_over="))
    main, _ = run(2, [*command, "run.resume=never", "run.steps=2", word])
    assert main.code == 0 and f"from scratch ({word})" in main.out
    assert exact(records(tmp_path / "run")) == exact(records(reference))[:2]
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert left == ["START.json", "step_00000002", "step_00000006.old"]


@contextmanager
def tokens_seen(rank: int) -> Iterator[list[tuple[int, str]]]:
    """(step, digest) of each sequence that this rank trains on."""
    from phalanx.moe.run.trainer import Trainer

    seen: list[tuple[int, str]] = []
    original = Trainer._train_step

    def step(self: Any) -> bool:
        forward = self.compute.forward_step

        def watched(batches: Any, chunk: Any, **named: Any) -> Any:
            batch = next(batches)
            for row in torch.cat((batch["tokens"], batch["labels"][:, -1:]), 1):
                digest = hashlib.sha256(row.numpy().tobytes()).hexdigest()
                seen.append((self.step + 1, digest))
            return forward(iter([batch]), chunk, **named)

        self.compute.forward_step = watched
        try:
            return original(self)
        finally:
            del self.compute.forward_step

    with mock.patch.object(Trainer, "_train_step", step):
        yield seen


def test_a_run_moves_between_layouts(corpus: list[str], tmp_path: Path) -> None:
    """EP2 x DP2, one rank, EP2 x DP2 again: the tokens of an uninterrupted run, and its losses."""
    common = [*corpus, *MODELS["tiny_deepseek"], "precision=fp32"]
    common += ["parallel.capacity_factor=8"]  # no step is run again, and sees its tokens twice
    straight = run(2, [*common, "run.steps=6", f"run.dir={tmp_path / 'a'}"], tokens_seen)
    seen: list[tuple[int, str]] = []
    for world, steps in ((2, 2), (1, 4), (2, 6)):
        command = [*common, f"run.steps={steps}", f"run.dir={tmp_path / 'b'}"]
        ranks = run(world, command, tokens_seen)
        assert [r.code for r in ranks] == [0] * world
        seen += [row for rank in ranks for row in rank.seen]
    expected = [row for rank in straight for row in rank.seen]
    assert len(expected) == 6 * 8 and sorted(seen) == sorted(expected)
    moved, stayed = (records(tmp_path / name / "run") for name in "ba")
    assert [r["step"] for r in moved] == [1, 2, 3, 4, 5, 6]
    for key, rel in (("loss", 2e-5), ("mtp_loss", 2e-5), ("grad_norm", 2e-3)):
        assert [r[key] for r in moved] == pytest.approx([r[key] for r in stayed], rel=rel)


# --- a step that must not be taken ----------------------------------------------------------------


@contextmanager
def not_finite(rank: int, *, at: int, where: str) -> Iterator[list[bool]]:
    """The loss of a step, or only its gradient, is NaN: did the parameters stay as they were?"""
    from phalanx.moe.run import step as computing
    from phalanx.moe.run import trainer

    mean_loss, step, unchanged = computing.mean_loss, trainer.Trainer._train_step, list[bool]()

    def spoilt(loss_BS: torch.Tensor, **given: Any) -> Any:
        total, count, report = mean_loss(loss_BS, **given)
        if where == "loss":
            return total * math.nan, count, {"loss": report["loss"] * math.nan}
        return total + (0 * total).sqrt(), count, report  # the slope of the root at 0 is infinite

    def watched(self: Any) -> bool:
        if self.step + 1 < at:
            return step(self)
        computing.mean_loss = spoilt
        parameters = [p for chunk in self.job.engine.modules for p in chunk.parameters()]
        before = [p.detach().clone() for p in parameters]
        try:
            return step(self)
        finally:
            unchanged.append(all(map(torch.equal, before, parameters)))

    trainer.Trainer._train_step = watched  # type: ignore[method-assign]
    try:
        yield unchanged
    finally:
        computing.mean_loss, trainer.Trainer._train_step = mean_loss, step  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_ends_the_run_before_the_update(
    corpus: list[str], tmp_path: Path, where: str
) -> None:
    command = [*corpus, *MODELS["tiny_deepseek"], "run.steps=4", "run.save_interval=1"]
    spoilt = [*command, f"run.dir={tmp_path / 'spoilt'}", "run.async_save=on"]
    (main,) = run(1, spoilt, partial(not_finite, at=3, where=where))
    assert main.code == 43 and main.seen == [True]
    assert len(main.err.splitlines()) == 1 and main.err.startswith("error: the ")
    assert "nan" in main.err and "diverged: step 2 after" in main.out
    checkpoints = tmp_path / "spoilt/run/checkpoints"
    assert [p.name for p in sorted(checkpoints.glob("step_*"))] == [
        "step_00000001",
        "step_00000002",
    ]

    (repeated,) = run(1, spoilt)
    assert repeated.code == 0 and "resumed from step 2: " in repeated.out
    run(1, [*command, f"run.dir={tmp_path / 'sound'}"])
    sound = records(tmp_path / "sound/run")
    assert exact(records(tmp_path / "spoilt/run")) == exact(sound) and len(sound) == 4


# --- no host reads between embedding and loss -----------------------------------------------------


def _sync_free(overrides: Sequence[str]) -> float:
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
    from torch.utils._python_dispatch import _disable_current_modes

    from phalanx.configs.load import load
    from phalanx.moe.run.start import make_trainer
    from phalanx.parallel.fault.signals import StopSignal
    from phalanx.parallel.runtime import start

    cfg = load(overrides)
    trainer = make_trainer(cfg, start(seed=1, timeout=60, deterministic=False), StopSignal())
    trainer.job.engine.train()
    # The one exempt place. Its two assignments of 0.0 under a boolean mask have no shape that
    # depends on a value: torch makes them a masked_fill.
    name = "calculate_predicted_logits"
    loss = getattr(VocabParallelCrossEntropy, name)

    def unwatched(*args: Any) -> Any:
        with _disable_current_modes():
            return loss(*args)

    setattr(VocabParallelCrossEntropy, name, staticmethod(unwatched))
    try:
        batches = trainer.data.loader.next_step()
        with sync_free():
            totals = trainer.compute.forward_backward(batches)
        trainer.data.loader.close()
        _, _, total, ranks, *_ = totals.tolist()  # after the shares of both parts of the budget
        return total / ranks
    finally:
        setattr(VocabParallelCrossEntropy, name, staticmethod(loss))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_forward_and_backward_never_wait_for_the_device(
    corpus: list[str], tmp_path: Path, model: str, world: int
) -> None:
    overrides = [*corpus, *MODELS[model], f"run.dir={tmp_path}", "run.steps=1", "kernels=torch"]
    for loss in run_distributed(_sync_free, world, overrides):
        assert 4 < loss < 8


def test_labels_are_counted_without_waiting(corpus: list[str], tmp_path: Path) -> None:
    overrides = [*corpus, *MODELS["tiny_deepseek"], f"run.dir={tmp_path}", "run.steps=1"]
    packed = ["kernels=torch", "data.document_mask=true", "model.moe.router.seq_aux_loss=0"]
    for loss in run_distributed(_sync_free, 2, [*overrides, *packed]):
        assert 4 < loss < 8
