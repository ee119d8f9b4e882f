"""Three phases of a tiny DeepSeek: short, long with YaRN, anneal; stopped in each of them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.moe.report.loggers import lines
from phalanx.parallel.checkpoint.saved_config import configuration
from phalanx.parallel.fault.signals import AGAIN
from phalanx.scripts.checkpoint import list_run
from phalanx.train import main
from tests.support.runs import DEEPSEEK, SMALL, Rank, exact, records, run, text, write_corpus
from tests.support.tiny_runs import step_of
from tests.support.torchrun import Program, Torchrun

pytestmark = pytest.mark.dist
LONG = [
    *("data.sequence_length=64", "data.micro_batch=2", "data.global_batch=4"),
    *("model.attention.rope_theta=5e4", "model.attention.yarn.factor=8"),
    *("model.attention.yarn.original_context=16", "optim.lr=5e-3"),
]


def phases(corpus: Sequence[str]) -> str:
    """Steps 1 to 4 on two sources; 5 to 8 four times as long; 9 to 12 on a third source too."""
    a, b, c = corpus
    anneal = [f"data.blend=[1,{a},1,{b},6,{c}]", "optim.schedule=linear", "optim.min_lr=0"]
    entries = [
        "{name:short,steps:4}",
        f"{{name:long,tokens:1024,overrides:{json.dumps(LONG)}}}",
        f"{{name:anneal,steps:4,keep_schedule:true,overrides:{json.dumps(anneal)}}}",
    ]
    return f"run.phases=[{','.join(entries)}]"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, pieces = tmp_path_factory.mktemp("corpus"), [list(p) for p in text()]
    corpus = [write_corpus(folder / name, pieces[i::3]) for i, name in enumerate("abc")]
    data = ["data=indexed", f"data.blend=[3,{corpus[0]},1,{corpus[1]}]"]
    data += [f"data.cache={folder / 'cache'}"]
    small = [word for word in SMALL if not word.startswith("optim.decay_steps")]
    return [*small, *DEEPSEEK, *data, "precision=fp32", phases(corpus)]


def whole(world: int, args: Sequence[str]) -> list[Rank]:
    """Processes of a run, which replace each other, until the last one; those of rank 0."""
    ended = [run(world, args)[0]]
    while ended[-1].code == AGAIN:
        ended.append(run(world, args)[0])
    return ended


@pytest.mark.parametrize(
    ("world", "end", "code", "more"),
    [
        (1, "raise", 1, ["run.save_interval=1"]),
        (2, "term", 85, ["run.requeue_code=85", "optim=muon", "precision=bf16"]),
    ],
    ids=["one rank, AdamW, fp32", "two ranks, Muon, bf16"],
)
def test_a_run_stopped_in_each_phase_ends_as_one_that_went_on(
    world: int, end: str, code: int, more: list[str], command: list[str], tmp_path: Path
) -> None:
    args = [*command, "optim.ema=0.9", *more]
    straight = whole(world, [*args, f"run.dir={tmp_path / 'a'}"])
    assert [main.code for main in straight] == [AGAIN, AGAIN, 0], straight[-1].err
    assert [
        f"-- phase {name} from step {step} on" in main.out
        for main, name, step in zip(straight, ("short", "long", "anneal"), (1, 5, 9), strict=True)
    ] == [True] * 3
    stops = f"run.inject=[{end}@3:rank0,{end}@7:rank0,{end}@11:rank0]"
    codes = []
    while codes[-1:] != [0]:
        codes.append(run(world, [*args, stops, f"run.dir={tmp_path / 'b'}"])[0].code)
        assert len(codes) < 9
    assert [each for each in codes if each != AGAIN] == [code, code, code, 0]
    one, other = (records(tmp_path / name / "run") for name in "ab")
    assert exact(one) == exact(other) and [r["step"] for r in one] == list(range(1, 13))
    assert [r["tokens"] for r in one] == [
        *(128 * step for step in range(1, 5)),
        *(512 + 256 * step for step in range(1, 9)),
    ]
    kept = sorted(path.name for path in (tmp_path / "b/run/checkpoints").glob("step_*"))
    assert {"step_00000004", "step_00000008", "step_00000012"} <= set(kept)


def test_the_learning_rate_of_each_phase(command: list[str], tmp_path: Path) -> None:
    """Warm-up and decay begin anew, and go on where `keep_schedule` says so."""
    whole(1, [*command, f"run.dir={tmp_path}"])
    rates = [r["lr"] for r in records(tmp_path / "run")]
    assert rates[:2] == [5e-3, 1e-2] and rates[4:6] == [2.5e-3, 5e-3]
    assert rates[3] == pytest.approx(3e-4, abs=2e-4) and rates[7] == pytest.approx(3e-4, abs=2e-4)
    # Steps 5 to 8 of a linear decay over eight, two of them warm-up.
    assert rates[8:] == pytest.approx([5e-3 * (8 - n) / 6 for n in (5, 6, 7, 8)])


def test_each_start_names_the_phases_that_follow(command: list[str], tmp_path: Path) -> None:
    """`scripts/watch.py` tells the end of a phase from that of the run by these."""
    whole(1, [*command, f"run.dir={tmp_path}"])
    starts = [r for r in lines(tmp_path / "run/metrics.jsonl") if r.get("event") == "start"]
    assert [r["phases_after"] for r in starts] == [["long", "anneal"], ["anneal"], []]


def test_checkpoints_know_their_phase(command: list[str], tmp_path: Path) -> None:
    whole(1, [*command, f"run.dir={tmp_path}", "run.keep_last=1"])
    found = [configuration(step_of(tmp_path / "run", step)).config for step in (4, 8, 12)]
    names = [[phase["name"] for phase in config["run"]["phases"]] for config in found]
    assert names == [["short"], ["short", "long"], ["short", "long", "anneal"]]
    assert [config["data"]["sequence_length"] for config in found] == [16, 64, 64]
    assert [config["run"]["phases"][-1]["steps"] for config in found] == [4, 4, 4]
    ends = [line.rpartition("  ")[2] for line in list_run(tmp_path / "run")]
    assert ends == [f"complete, the end of phase {name}" for name in reversed(names[-1])]


def test_a_damaged_end_of_a_phase_goes_back_to_that_phase(
    command: list[str], tmp_path: Path
) -> None:
    args = [*command, f"run.dir={tmp_path / 'a'}", "run.save_interval=2"]
    assert run(1, args)[0].code == AGAIN
    last = step_of(tmp_path / "a/run", 4)
    (shard,) = [path for path in last.glob("*.distcp") if path.stat().st_size > 1000][:1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    ended = whole(1, args)
    assert [main.code for main in ended] == [AGAIN, AGAIN, AGAIN, 0]
    assert "is not valid" in ended[0].err and "resumed from step 2" in ended[1].out
    whole(1, [*command, f"run.dir={tmp_path / 'b'}"])
    one, other = (exact(records(tmp_path / name / "run")) for name in "ab")
    assert one == other


def test_a_finished_run_says_so(command: list[str], tmp_path: Path) -> None:
    args = [*command, f"run.dir={tmp_path}"]
    whole(1, args)
    (main,) = run(1, args)
    assert main.code == 0 and "nothing was left to do" in main.out


@pytest.mark.parametrize(
    ("given", "world"), [("{name:a,steps:2}", 1), ("{name:a,steps:1},{name:b,steps:1}", 2)]
)
def test_phases_that_end_before_the_checkpoint_are_refused(
    given: str, world: int, command: list[str], tmp_path: Path
) -> None:
    """No phase is then that of the checkpoint, and processes would replace each other for ever."""
    args = [*command[:-1], f"run.dir={tmp_path}"]
    assert run(1, [*args, "run.steps=3"])[0].code == 0
    begins = ["run.name=other", f"run.resume={step_of(tmp_path / 'run', 3)}"]
    for more in ([], begins):
        again = [*args, *more, f"run.phases=[{given}]"]
        ranks = run(world, again)
        assert [rank.code for rank in ranks] == [2] * world, ranks[0].out
        (line,) = [x for x in ranks[0].err.splitlines() if x.startswith("error: ")]
        assert line.startswith("error: run.phases end at step 2, and the checkpoint to go on from ")
        with pytest.raises(SystemExit, match="2"):
            main([*again, "--check"])


def test_phases_are_added_to_a_run(command: list[str], tmp_path: Path) -> None:
    """The first is what the run has done; steps within a phase keep to its data."""
    without = [word for word in command if not word.startswith("run.phases")]
    (main,) = run(1, [*without, f"run.dir={tmp_path}", "run.steps=3"])
    assert main.code == 0, main.err
    long = json.dumps(LONG)
    args = [*without, f"run.dir={tmp_path}"]
    wrong = f"run.phases=[{{name:base,steps:2}},{{name:long,steps:2,overrides:{long}}}]"
    (main,) = run(1, [*args, wrong])
    assert main.code == 2 and "data.sequence_length" in main.err and "run.phases" in main.err
    right = f"run.phases=[{{name:base,steps:3}},{{name:long,steps:2,overrides:{long}}}]"
    (main,) = run(1, [*args, right])
    assert main.code == 0 and "data.sequence_length 16 -> 64" in main.err, main.err
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4, 5]


def killed(folder: Path, command: Sequence[str], times: int) -> list[Program]:
    """Launches of a command that kills itself so often, and then ends."""
    launches = []
    for number in range(times + 1):
        launches.append(Program(["train.py", *command], folder / f"out{number}", {"RANK": "0"}))
        assert (launches[-1].wait() == 0) == (number == times), launches[-1].err()
    return launches


def test_processes_that_are_killed_in_each_phase(command: list[str], tmp_path: Path) -> None:
    """As `train.py` is started; a phase that begins replaces the process by a new one."""
    kill = "run.inject=[kill@3,kill@7,kill@11]"
    args = [*command, "run.save_interval=1", f"run.dir={tmp_path / 'a'}"]
    launches = killed(tmp_path, [*args, kill], 3)
    assert ["phase long" in launch.out() for launch in launches] == [False, True, True, False]
    whole(1, [*command, f"run.dir={tmp_path / 'b'}"])
    one, other = (exact(records(tmp_path / name / "run")) for name in "ab")
    assert one == other and len(one) == 12
    # The end of a phase has counted all time until then, and what follows none of it again.
    written = lines(tmp_path / "a/run/metrics.jsonl")
    ends = [i for i, record in enumerate(written) if record.get("event") == "summary"]
    assert [written[i]["at"] for i in ends] == [4, 8, 12]
    for end, later in ((written[i], record) for i in ends for record in written[i:]):
        counted = sum(later["seconds"].values()) - sum(end["seconds"].values())
        assert counted < later["time"] - end["time"] + 0.05


@pytest.mark.slow
def test_torchrun_sees_one_process_in_all_phases(command: list[str], tmp_path: Path) -> None:
    args = ["train.py", *command, f"run.dir={tmp_path / 'a'}", "run.inject=[kill@7:rank1]"]
    with Torchrun(2, args, tmp_path / "out", ["--max-restarts", "1"], 400) as launch:
        assert launch.wait() == 0, launch.err()
    assert launch.out().count("-- phase long from step 5 on") == 2
    whole(2, [*command, f"run.dir={tmp_path / 'b'}"])
    one, other = (exact(records(tmp_path / name / "run")) for name in "ab")
    assert one == other and len(one) == 12


def test_the_checkpoint_before_a_phase_may_be_moved(command: list[str], tmp_path: Path) -> None:
    """The end of a phase is a checkpoint like others, from which another run may begin."""
    assert run(1, [*command, f"run.dir={tmp_path}"])[0].code == AGAIN
    moved = tmp_path / "moved"
    shutil.copytree(step_of(tmp_path / "run", 4), moved)
    args = [*command, f"run.dir={tmp_path}", "run.name=other", f"run.resume={moved}"]
    ended = whole(1, args)
    assert [main.code for main in ended] == [AGAIN, 0], ended[-1].err
    assert "-- phase long from step 5 on" in ended[0].out
    whole(1, [*command, f"run.dir={tmp_path}"])
    one, other = (exact(records(tmp_path / name)) for name in ("run", "other"))
    assert one[4:] == other
