"""NaN, Inf and spikes never reach the parameters: runs that stop, skip or roll back.

A number is corrupted on one rank only; every rank must notice before any rank changes state.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from phalanx.configs.schema import RunConfig
from phalanx.moe.report.loggers import lines
from phalanx.moe.report.step_records import EVERY, PATIENCE, ExpertWatch
from phalanx.moe.router.balance import Balance
from phalanx.moe.run.progress import WINDOW, Health
from phalanx.parallel.engine import Diverged
from tests.support.runs import DEEPSEEK, SMALL, exact, records, run, with_corpus
from tests.support.training import digest


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = with_corpus(tmp_path_factory.mktemp("corpus"))
    return [*SMALL, *DEEPSEEK, "model.moe.router.bias_rate=0.01", *data, "run.steps=6"]


def _state(trainer: Any) -> str:
    """Digest of the state that an update changes: parameters, masters, moments, step, bias."""
    from phalanx.parallel.checkpoint.model_state import parameters_gathered

    engine = trainer.job.engine
    with parameters_gathered(engine.chunks):
        named = [n for c in engine.modules for n in (*c.named_parameters(), *c.named_buffers())]
        tensors = [t for name, t in named if "bias" in name or "statistics" not in name]
        for part in engine.optimizer.chained_optimizers:
            for group in part.param_groups:
                tensors += group["params"] + [torch.tensor(float(group.get("step", 0)))]
            tensors += [t for s in part.optimizer.state.values() for t in s.values()]
        return digest(tensors)


class Bad(NamedTuple):
    """Multiply the loss on one rank in one step; `run.inject` corrupts only gradients."""

    value: float
    rank: int


class Seen(NamedTuple):
    """State of one step on this rank."""

    step: int
    """Step number after it."""
    consumed: int
    """Samples consumed."""
    before: str
    """Digest of the state after it."""
    after: str


@contextmanager
def spoilt(rank: int, *, bad: dict[int, Bad]) -> Iterator[list[Seen]]:
    """Corrupt the n-th executed step by `bad[n]`; yields what each step did."""
    from phalanx.moe.run import failure, trainer
    from phalanx.moe.run import step as computing

    failure._GRACE = 0.3  # no launcher will signal these ranks
    mean_loss, step, seen = computing.mean_loss, trainer.Trainer._train_step, list[Seen]()

    def bad_loss(what: Bad, loss_BS: torch.Tensor, **given: Any) -> Any:
        total, count, report = mean_loss(loss_BS, **given)
        return total * what.value, count, {"loss": report["loss"] * what.value}

    def watched(self: Any) -> bool:
        what, before = bad.get(len(seen) + 1), _state(self)
        if what is not None and what.rank == rank:
            computing.mean_loss = partial(bad_loss, what)
        try:
            return step(self)
        finally:
            computing.mean_loss = mean_loss
            seen.append(Seen(self.step, self.data.loader.consumed_samples, before, _state(self)))

    trainer.Trainer._train_step = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        computing.mean_loss, trainer.Trainer._train_step = mean_loss, step  # type: ignore[method-assign]


LOSS, INF = Bad(math.nan, 1), Bad(math.inf, 1)


@pytest.fixture(scope="module")
def sound(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Records of a run without a bad step."""
    folder = tmp_path_factory.mktemp("sound")
    ranks = run(2, [*command, f"run.dir={folder}"])
    assert [(r.code, r.err) for r in ranks] == [(0, ""), (0, "")]
    return exact(records(folder / "run"))


@pytest.mark.dist
@pytest.mark.parametrize("bad", [LOSS, pytest.param(INF, marks=pytest.mark.slow)])
def test_stop(command: list[str], tmp_path: Path, sound: list[Any], bad: Bad) -> None:
    more = [f"run.dir={tmp_path}", "run.save_interval=1"]
    ranks = run(2, [*command, *more], partial(spoilt, bad={3: bad}))
    for rank in ranks:
        assert rank.code == 43 and rank.seen[2].before == rank.seen[2].after
        assert rank.seen[1].before != rank.seen[1].after
    (line,) = ranks[0].err.splitlines()
    assert "of step 3 is" in line and "the parameters are unchanged" in line
    assert "run.bad_steps=skip" in line and "diverged: step 2 after" in ranks[0].out
    assert exact(records(tmp_path / "run")) == sound[:2]
    assert (tmp_path / "run/checkpoints/step_00000002/COMMIT.json").exists()
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["seconds"]["skipped"] > 0


@pytest.mark.dist
def test_skip(command: list[str], tmp_path: Path, sound: list[Any]) -> None:
    """Three of six, with a checkpoint in between: the counts continue after a resume."""
    args = [*command, f"run.dir={tmp_path}", "run.bad_steps=skip"]
    more = ["run.steps=4", "run.inject=nan@3:rank0"]
    first = run(2, [*args, *more], partial(spoilt, bad={2: LOSS}))
    repeated = run(2, [*args, "run.inject=nan@5:rank1"], partial(spoilt, bad={}))
    for rank in (0, 1):
        assert (first[rank].code, repeated[rank].code) == (0, 0)
        seen = first[rank].seen + repeated[rank].seen
        assert [(s.step, s.consumed) for s in seen] == [(n, 8 * n) for n in range(1, 7)]
        assert [s.before == s.after for s in seen] == [False, True, True, False, True, False]
    assert first[0].out.count("-- skipped: the ") == 2 and "  skipped 2" in first[0].out
    actual = records(tmp_path / "run")
    assert [r["step"] for r in actual] == [1, 2, 3, 4, 5, 6]
    assert [r.get("skipped", 0) for r in actual] == [0, 1, 2, 2, 3, 3]
    assert [r["tokens"] for r in actual] == [8 * 16 * n for n in (1, 1, 1, 2, 2, 3)]
    assert actual[1]["nonfinite"] and "load_max" not in actual[1] and "load_max" in actual[3]
    lines = first[0].out.splitlines()
    (heading,) = (t for t in lines if t.lstrip().startswith("step  "))
    (row,) = (t for t in lines if t.lstrip().startswith("2/4"))
    assert row.index("  skipped 1") == len(heading)
    assert exact(actual[:1]) == sound[:1]


@pytest.mark.dist
def test_too_many_skips_end_the_run(command: list[str], tmp_path: Path) -> None:
    more = [f"run.dir={tmp_path}", "run.bad_steps=skip", "run.max_bad_steps=2"]
    more += [f"run.inject={','.join(f'nan@{step}:rank0' for step in (1, 3, 4, 5))}"]
    ranks = run(2, [*command, *more], partial(spoilt, bad={}))
    assert [r.code for r in ranks] == [43, 43]
    assert [s.before == s.after for s in ranks[1].seen] == [True, False, True, True, True]
    (line,) = ranks[0].err.splitlines()
    assert "step 5 is nan, after 2 steps skipped in a row (run.max_bad_steps)" in line


@pytest.mark.dist
@pytest.mark.parametrize("async_save", [pytest.param("off", marks=pytest.mark.slow), "on"])
def test_roll_back(
    command: list[str],
    tmp_path: Path,
    sound: list[Any],
    async_save: str,
) -> None:
    """Step 4 is bad: back to the checkpoint of step 2, then on with the samples after step 4."""
    more = [f"run.dir={tmp_path}", "run.save_interval=2", f"run.async_save={async_save}"]
    args = [*command, *more]
    bad = ["run.bad_steps=rollback", "run.inject=nan@4:rank0"]
    main, other = run(2, [*args, *bad], partial(spoilt, bad={}))
    for rank in (main, other):
        assert rank.code == 0
        assert [s[:2] for s in rank.seen] == [
            *[(1, 8), (2, 16), (3, 24)],
            (2, 32),
            *[(3, 40), (4, 48), (5, 56), (6, 64)],
        ]
        assert rank.seen[3].after == rank.seen[1].after != rank.seen[2].after
    assert main.out.count("-- rolled back to ") == 1 and "step_00000002: the gradient" in main.out
    assert main.out.count("  rollbacks 1") == 1
    actual = records(tmp_path / "run")
    assert [r["step"] for r in actual] == [1, 2, 3, 4, 5, 6] and actual[-1]["rollbacks"] == 1
    assert [r["tokens"] for r in actual] == [8 * 16 * n for n in range(1, 7)]
    assert exact(actual[:2]) == sound[:2] and exact(actual[2:3]) != sound[2:3]
    assert (tmp_path / "run/metrics.jsonl").read_text().count('"step": 3,') == 1
    assert '"step": 3,' in (tmp_path / "run/metrics.superseded.jsonl").read_text()

    # The cursor that is ahead of the step is in the checkpoint, and there is data to the end.
    main, _ = run(2, [*args, "run.steps=8"], partial(spoilt, bad={}))
    assert main.code == 0 and [s[:2] for s in main.seen] == [(7, 72), (8, 80)]
    assert records(tmp_path / "run")[-1]["tokens"] == 8 * 8 * 16


@pytest.mark.dist
def test_rollbacks_that_cannot_help_end_the_run(command: list[str], tmp_path: Path) -> None:
    args = [*command, "run.bad_steps=rollback", "run.max_bad_steps=2", f"run.dir={tmp_path}"]
    main, other = run(2, args, partial(spoilt, bad={2: LOSS}))
    (line,) = main.err.splitlines()
    assert main.code == other.code == 43 and "there is no checkpoint to go back to" in line
    change = partial(spoilt, bad=dict.fromkeys((2, 3, 4), LOSS))
    main, other = run(2, [*args, "run.save_interval=1", "run.name=again"], change)
    (line,) = main.err.splitlines()
    assert main.code == other.code == 43 and main.out.count("rolled back") == 2
    assert "the run has gone back to step 1 2 times (run.max_bad_steps)" in line


@contextmanager
def host_reads(rank: int) -> Iterator[list[list[str]]]:
    """Names of the calls in each step that copy a value to the host."""
    from phalanx.moe.run.trainer import Trainer

    step, names = Trainer._train_step, ("item", "tolist", "__float__", "__int__", "__bool__")
    real, reads = {n: getattr(torch.Tensor, n) for n in names}, list[list[str]]()

    def noting(name: str) -> Any:
        def noted(tensor: torch.Tensor, *args: Any) -> Any:
            reads[-1].append(name)
            return real[name](tensor, *args)

        return noted

    def watched(self: Any) -> bool:
        reads.append([])
        for name in names:
            setattr(torch.Tensor, name, noting(name))
        try:
            return step(self)
        finally:
            for name in names:
                setattr(torch.Tensor, name, real[name])

    with mock.patch.object(Trainer, "_train_step", watched):
        yield reads


@pytest.mark.dist
def test_one_host_read_a_step(command: list[str], tmp_path: Path) -> None:
    """It follows forward, backward and reduction, which may be in a graph, and decides the step."""
    more = ["run.log_interval=100", "run.bad_steps=skip", "run.skip_spikes=6", "run.steps=3"]
    more += ["parallel.capacity_factor=8"]  # no step is run again
    more += ["kernels=torch"]  # the reference reads counts
    ranks = run(2, [*command, *more, f"run.dir={tmp_path}"], host_reads)
    for rank in ranks:
        assert rank.code == 0 and rank.seen[:2] == [["tolist"], ["tolist"]]


# --- spikes ---------------------------------------------------------------------------------------


def judge(**knobs: Any) -> Health:
    return Health(RunConfig(**{"skip_spikes": 6.0} | knobs))


def noise(step: int) -> float:
    """Deterministic numbers around 0 with a spread below 1."""
    return (step * 7919 % 101) / 101 - 0.5


def fill(health: Health, steps: int = 64) -> None:
    for step in range(1, steps + 1):
        assert health.fault(step, 4 + noise(step), 1 + noise(step + 3) / 2) is None


def test_a_spike_of_loss_or_norm_is_found_after_half_a_window() -> None:
    early, health = judge(), judge()
    fill(early, 63)
    assert early.fault(64, 400.0, 1.0) is None
    fill(health)
    sigma = 0.29  # of `noise`
    assert health.fault(65, 4 + 7 * sigma, 1.0) == (
        "the loss of step 65 is 6.03, 7.0 sigma above the last 64 (run.skip_spikes)"
    )
    assert "the gradient norm of step 65 is 9, " in str(health.fault(65, 4.0, 9.0))
    assert health.fault(65, 4 + 5 * sigma, 1.0) is None, "within six sigma"
    assert health.fault(66, 0.0, 0.0) is None, "a fall is no spike"


def test_a_spike_is_not_measured_by_itself() -> None:
    health = judge(max_bad_steps=200)
    fill(health)
    before = health.state_dict()["seen"]
    for step in range(65, 165):
        fault = health.fault(step, 1e30, 1.0)
        assert fault is not None and health.skips(fault, finite=True)
    assert health.skipped == 100 and health.state_dict()["seen"] == before


def test_spikes_are_not_looked_for_unless_asked() -> None:
    health = judge(skip_spikes=0.0)
    fill(health)
    assert health.fault(65, 1e30, 1e30) is None


def test_a_resumed_detector_judges_as_one_that_went_on() -> None:
    """Through JSON, as in a checkpoint."""
    health = judge()
    fill(health, 200)
    assert len(health.state_dict()["seen"]["loss"]) == WINDOW
    resumed = judge()
    resumed.load_state_dict(json.loads(json.dumps(health.state_dict())))
    assert resumed.state_dict() == health.state_dict()
    for step in range(200, 300):
        value = 5.6 + noise(step)
        assert health.fault(step, value, 1.0) == resumed.fault(step, value, 1.0)


def test_a_spike_is_skipped_and_not_rolled_back() -> None:
    health = judge(bad_steps="rollback", max_bad_steps=1)
    assert not health.skips("nan", finite=False)
    assert health.skips("spike", finite=True)
    with pytest.raises(Diverged, match="after 1 step skipped in a row"):
        health.skips("spike", finite=True)


@contextmanager
def spike(rank: int, *, at: int, only: int) -> Iterator[list[Seen]]:
    """The window is 8 steps; the loss of one rank and step is 30 times as large."""
    from phalanx.moe.run import progress

    window, progress.WINDOW = progress.WINDOW, 8
    try:
        with spoilt(rank, bad={at: Bad(30.0, only)}) as seen:
            yield seen
    finally:
        progress.WINDOW = window


@pytest.mark.dist
def test_a_spike_on_one_rank_is_skipped_by_all(command: list[str], tmp_path: Path) -> None:
    """Also by a run that was resumed between the window and the spike."""
    more = ["run.steps=9", "run.skip_spikes=6", "run.save_interval=6"]
    more += ["optim.lr=1e-4", "optim.min_lr=0"]
    args = [*command, *more]
    straight = run(2, [*args, f"run.dir={tmp_path / 'a'}"], partial(spike, at=8, only=1))
    for rank in straight:
        assert rank.code == 0
        assert [s.before == s.after for s in rank.seen] == [False] * 7 + [True, False]
    assert "skipped: the loss of step 8 is" in straight[0].out and "sigma above" in straight[0].out
    saved = tmp_path / "a/run/checkpoints/step_00000006"
    resumed = [*args, f"run.dir={tmp_path / 'b'}", f"run.resume={saved}"]
    repeated = run(2, resumed, partial(spike, at=2, only=1))
    assert [r.seen[-1].after for r in repeated] == [r.seen[-1].after for r in straight]
    actual, other = (records(tmp_path / name / "run") for name in "ab")
    assert exact(actual)[6:] == exact(other) and other[-1]["skipped"] == 1


# --- experts --------------------------------------------------------------------------------------


def balance(load: float = 1.0, idle: tuple[tuple[int, int], ...] = ()) -> Balance:
    return Balance({1: 1.0, 2: load}, frozenset(idle), {})


def test_an_expert_that_stays_idle_is_told_once_in_a_while() -> None:
    watch, reported = ExpertWatch(most=8.0, step=0), {}
    for step in range(10, 1010, 10):
        brief = ((1, 3),) if step < 90 else ()
        for line in watch.look(balance(idle=((2, 5), *brief)), step):
            reported[step] = line
    assert list(reported) == [PATIENCE, PATIENCE + EVERY]
    assert reported[PATIENCE].startswith(
        "warning: 1 expert had no token for 100 steps (layer 2 exp"
    )
    assert "raise model.moe.router.bias_rate" in reported[PATIENCE]


def test_a_layer_that_stays_collapsed_is_told() -> None:
    watch = ExpertWatch(most=8.0, step=40)
    assert watch.look(balance(load=7.9), 100) == []
    assert watch.look(balance(load=4.4), 110) == [], "below half of the way"
    assert watch.look(balance(load=4.6), 150) == []
    assert watch.look(balance(load=4.6), 200) == []
    (line,) = watch.look(balance(load=4.6), 210)
    assert "layer 2 has 4.6 x the mean load, of at most 8.0" in line


def test_nothing_is_told_of_what_was_rolled_back() -> None:
    watch = ExpertWatch(most=8.0, step=0)
    assert watch.look(balance(idle=((1, 1),)), 90) == []
    watch.rewind(20)
    assert watch.look(balance(idle=((1, 1),)), 100) == []
    assert watch.look(balance(idle=((1, 1),)), 120) != []


def test_dense_routing_never_collapses() -> None:
    watch = ExpertWatch(most=1.0, step=0)
    assert watch.look(balance(load=1.0), 1000) == []
