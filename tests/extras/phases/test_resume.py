"""A run that begins with another one's checkpoint: what it may change, and what it keeps."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.extras.phases.positions import _rewritten
from phalanx.moe.data.sources import Source
from phalanx.moe.hf.pieces import PieceReader
from phalanx.parallel.checkpoint import start
from phalanx.scripts import checkpoint
from tests.support.runs import DEEPSEEK, SMALL, exact, records, run, text, write_corpus
from tests.support.tiny_runs import step_of

pytestmark = pytest.mark.dist
DOCS = Path(__file__).resolve().parents[3] / "docs/checkpoints.md"
STILL = [  # a step that leaves weights, moments and averages all but as they are
    *("optim.lr=1e-30", "optim.min_lr=1e-30", "optim.beta1=0.9999999", "optim.beta2=0.9999999"),
    *("optim.ema=0.9999999", "model.moe.router.bias_rate=1e-30", "optim.momentum=0.9999999"),
]
OTHER = [
    *("data.sequence_length=64", "data.micro_batch=2", "data.global_batch=4", "data.seed=7"),
    *("model.attention.rope_theta=1e6", "model.attention.yarn.factor=8"),
    *("model.attention.yarn.original_context=16", "optim.schedule=linear"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, pieces = tmp_path_factory.mktemp("corpus"), [list(p) for p in text()]
    return [write_corpus(folder / name, pieces[i::3]) for i, name in enumerate("abc")]


@pytest.fixture(scope="module")
def command(corpus: list[str]) -> list[str]:
    return [*SMALL, *DEEPSEEK, "data=indexed", f"data.cache={Path(corpus[0]).parent / 'cache'}"]


def blend(*sources: str) -> str:
    return f"data.blend=[{','.join(sources)}]"


def tensors(folder: Path) -> dict[str, Tensor]:
    """All of a checkpoint that a run reads: weights, and below `optimizer.` its state."""
    reader = PieceReader(folder, lambda done, total: None)
    keys = [key for key in reader.keys() if reader.dtype(key).is_floating_point]
    return {key: reader.read(key, (0, reader.shape(key)[0])).float() for key in keys}


@pytest.mark.parametrize(
    ("worlds", "more"),
    [((1, 2), ["precision=fp32"]), ((2, 1), ["optim=muon"])],
    ids=["AdamW, fp32", "Muon, bf16"],
)
def test_weights_moments_averages_and_biases_are_kept(
    worlds: tuple[int, int],
    more: list[str],
    command: list[str],
    corpus: list[str],
    tmp_path: Path,
) -> None:
    """The run has another rotary base, YaRN, length, batch, data, schedule and layout."""
    a, b, c = corpus
    args = [*command, *more, f"run.dir={tmp_path}"]
    first = run(worlds[0], [*args, blend(a, b), "run.steps=3", "optim.ema=0.9"])[0]
    assert first.code == 0, first.err
    origin = step_of(tmp_path / "run", 3)
    begins = [*args, "run.name=long", f"run.resume={origin}", blend(b, c), *OTHER, *STILL]
    main = run(worlds[1], [*begins, "run.steps=4"])[0]
    assert main.code == 0 and "resumed from step 3" in main.out, main.err
    for knob, change in {
        "data.sequence_length": "16 -> 64",
        "data.global_batch": "8 -> 4",
        "data.seed": "1234 -> 7",
        "model.attention.rope_theta": "10000.0 -> 1000000.0",
        "model.attention.yarn.factor": "4.0 -> 8.0",
        "optim.schedule": "cosine -> linear",
        "data.blend": re.escape(f'["{a}", "{b}"] -> ["{b}", "{c}"]'),
    }.items():
        assert re.search(f"{re.escape(knob)} {change}", main.err), knob
    assert re.search(r"-- data: b goes on after \d+ tokens, c begins\n", main.out)
    old, new = tensors(origin), tensors(step_of(tmp_path / "long", 4))
    assert old.keys() == new.keys()
    kinds = {"expert_bias", "exp_avg", "ema", "weight"}
    assert kinds == {kind for kind in kinds for key in new if kind in key}
    for key in old:
        torch.testing.assert_close(new[key], old[key], rtol=1e-5, atol=1e-6, msg=key)
    assert records(tmp_path / "long")[-1]["tokens"] == 3 * 128 + 256


def test_a_source_is_added_to_a_run(command: list[str], corpus: list[str], tmp_path: Path) -> None:
    """It needs no weight of 0 before; a launch that is repeated then goes on bit for bit."""
    a, b, c = corpus
    args = [*command, "precision=fp32", "run.save_interval=3", f"run.dir={tmp_path}"]
    (main,) = run(1, [*args, blend(a, b), "run.steps=3"])
    assert main.code == 0, main.err
    added = [*args, "run.keep_last=9", blend("1", a, "1", b, "2", c), "run.steps=9"]
    (main,) = run(1, [*added, "run.inject=[raise@8]"])
    assert main.code == 1 and ", c begins\n" in main.out
    assert re.search(r" c +training +50\.0% ", main.out)
    (main,) = run(1, [*added, "run.inject=[raise@8]"])
    assert main.code == 0 and "resumed from step 6" in main.out and "begins" not in main.out
    straight = exact(records(tmp_path / "run"))
    other = [*args, f"run.resume={step_of(tmp_path / 'run', 3)}", "run.name=other"]
    (main,) = run(1, [*other, *added[-2:]])
    assert exact(records(tmp_path / "other")) == straight[3:] and len(straight) == 9


def test_a_source_that_was_written_anew_is_told(command: list[str], tmp_path: Path) -> None:
    """Its path is the same, and its samples are others."""
    pieces = [list(p) for p in text()]
    a, b = (write_corpus(tmp_path / name, pieces) for name in "ab")
    args = [*command, f"run.dir={tmp_path}", blend("1", a, "1", b), "data.split=1"]
    assert run(1, [*args, "run.steps=1"])[0].code == 0
    (main,) = run(1, [*args, "run.steps=2"])
    assert main.code == 0 and "warning: data" not in main.out, main.err
    write_corpus(tmp_path / "b", pieces[1:])
    (main,) = run(1, [*args, "run.steps=3"])
    assert main.code == 0, main.err
    (line,) = [line for line in main.out.splitlines() if line.startswith("-- warning: data")]
    now, before = (
        f"{sum(map(len, p)):,} tokens in {len(p)} documents" for p in (pieces[1:], pieces)
    )
    assert line.startswith(f"-- warning: data: b has {now}, and had {before} when the checkpoint")
    (main,) = run(1, [*args, "run.steps=4"])
    assert main.code == 0 and "warning: data" not in main.out, main.err


def test_other_contents_of_the_same_size_are_told(command: list[str], tmp_path: Path) -> None:
    pieces = [list(p) for p in text()]
    a, b = (write_corpus(tmp_path / name, pieces) for name in "ab")
    args = [*command, f"run.dir={tmp_path}", blend("1", a, "1", b), "data.split=1"]
    assert run(1, [*args, "run.steps=1"])[0].code == 0
    write_corpus(tmp_path / "b", pieces[::-1])
    (main,) = run(1, [*args, "run.steps=2"])
    assert main.code == 0, main.err
    (line,) = [line for line in main.out.splitlines() if line.startswith("-- warning: data")]
    size = f"{sum(map(len, pieces)):,} tokens in {len(pieces)} documents"
    assert line.startswith(
        f"-- warning: data: b has {size} as before, and other contents than it had when the "
    )
    (main,) = run(1, [*args, "run.steps=3"])
    assert main.code == 0 and "warning: data" not in main.out, main.err


def test_a_checkpoint_without_stamps_tells_sizes_alone() -> None:
    source = Source("wiki", 1.0, 10, 100, 9, 6.0, 4.0, stamp="f00d")
    told = {
        tuple(before): [*_rewritten({"sources": [before]}, [source])]
        for before in ([10, 100], [10, 101], [10, 100, "f00d"], [10, 100, "beef"])
    }
    assert [len(lines) for lines in told.values()] == [0, 1, 0, 1]


def test_a_rollback_goes_back_to_before_the_change(
    command: list[str], corpus: list[str], tmp_path: Path
) -> None:
    """It is the checkpoint of another run; the data goes on after the bad step."""
    args = [*command, f"run.dir={tmp_path}", "precision=fp32"]
    assert run(1, [*args, blend(corpus[0]), "run.steps=3"])[0].code == 0
    origin = step_of(tmp_path / "run", 3)
    begins = [*args, "run.name=long", f"run.resume={origin}", blend(*corpus), *OTHER]
    (main,) = run(1, [*begins, "run.steps=5", "run.bad_steps=rollback", "run.inject=[nan@4]"])
    assert main.code == 0 and "-- rolled back to" in main.out, main.err
    found = records(tmp_path / "long")
    assert [(r["step"], r["tokens"]) for r in found] == [(4, 640), (5, 896)]
    (main,) = run(1, [*begins, "run.steps=5", "run.name=plain"])
    assert found[0]["loss"] != records(tmp_path / "plain")[0]["loss"]


def test_an_average_of_weights_may_change_all_of_it(
    command: list[str], corpus: list[str], tmp_path: Path
) -> None:
    args = [*command, f"run.dir={tmp_path}", "precision=fp32"]
    assert run(1, [*args, blend(corpus[0]), "run.steps=3"])[0].code == 0
    out = tmp_path / "averaged"
    assert checkpoint.main(["average", str(tmp_path / "run"), "--out", str(out)]) == 0
    begins = [*args, "run.name=long", f"run.resume={out}", blend(*corpus), *OTHER]
    (main,) = run(1, [*begins, "run.steps=2"])
    assert main.code == 0 and "rope_theta 10000.0 -> 1000000.0" in main.err, main.err


@pytest.mark.parametrize(
    ("change", "own", "other"),
    [
        ("data.sequence_length=32", True, False),
        ("model.attention.rope_theta=1e6", True, False),
        ("model.moe.ffn=32", True, True),
        ("model.moe.router.bias_rate=0", True, True),
        ("optim=muon", True, True),
        ("data.split=50", True, False),
    ],
)
def test_what_a_run_and_what_its_successor_may_not_change(
    change: str, own: bool, other: bool, trained: list[str], tmp_path: Path
) -> None:
    """A check refuses it; the message says where the change would be allowed."""
    folder = Path(trained[-1].removeprefix("run.dir="))
    begins = [f"run.resume={step_of(folder / 'run', 1)}", "run.name=new", f"run.dir={tmp_path}"]
    for more, refused in (([], own), (begins, other)):
        (main,) = run(1, [*trained, *more, "run.steps=1", change, "--check"])
        assert main.code == (2 if refused else 0), main.err
        if refused:
            assert change.split("=")[0].split(".")[-1] in main.err
            assert ("or begin a run or phase with the checkpoint" in main.err) == (not other)


@pytest.fixture(scope="module")
def trained(
    command: list[str], corpus: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Command of a run of one step, its folder at the end."""
    args = [*command, "precision=fp32", blend(corpus[0])]
    args.append(f"run.dir={tmp_path_factory.mktemp('trained')}")
    assert run(1, [*args, "run.steps=1"])[0].code == 0
    return args


def documented() -> dict[str, str]:
    """When a knob or section may change, by the table of the page."""
    rows = re.findall(
        r"^\| (`.+`) \| (at|where|never)(.*?) \| .+ \|$", DOCS.read_text("utf-8"), re.M
    )
    return {
        knob: when + rest for knobs, when, rest in rows for knob in re.findall(r"`(.+?)`", knobs)
    }


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    table = documented()
    assert {knob: when for knob, when in table.items() if when != start.ALWAYS} == {
        knob: when for knob, when in start.CHANGES.items() if when != start.ALWAYS
    }
    always = {knob for knob, when in table.items() if when == start.ALWAYS}
    assert always >= {knob for knob, when in start.CHANGES.items() if when == start.ALWAYS}
    for knob in always:
        assert not start.must_agree(knob, 1, 2), knob
