"""Configurations of phases: what each has, and mistakes that are told before the first begins."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.configs.load import Ended, from_argv
from phalanx.configs.schema import Config
from phalanx.extras.phases.configurations import configurations
from phalanx.train import main
from tests.support.pages import blocks
from tests.support.runs import write_corpus

LONG = {"name": "long", "steps": 20, "overrides": ["data.sequence_length=512", "optim.lr=1e-3"]}

WARM_UP = "model.attention.sparse.phase=warm_up"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def phases(*entries: dict[str, Any]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
        return json.dumps(value)

    return f"run.phases=[{','.join(map(written, entries))}]"


def of(*argv: str) -> list[Config]:
    return configurations(from_argv(argv), argv)


def lengths(found: Sequence[Config]) -> list[tuple[int, int]]:
    """First and last step of each phase."""
    return [(cfg.run.phases[-1].first + 1, cfg.run.steps) for cfg in found]


def test_each_phase_has_the_overrides_of_those_before_it() -> None:
    last = {"name": "last", "steps": 5, "overrides": ["optim.lr=5e-4"], "keep_schedule": True}
    found = of(phases({"name": "short", "steps": 10}, LONG, last), "optim.lr=1e-2")
    assert [cfg.optim.lr for cfg in found] == [1e-2, 1e-3, 5e-4]
    assert [cfg.data.sequence_length for cfg in found] == [256, 512, 512]
    assert lengths(found) == [(1, 10), (11, 30), (31, 35)]
    assert [cfg.run.phases[-1].schedule_begin for cfg in found] == [0, 10, 10]


def test_an_option_of_a_group_takes_the_place_of_earlier_ones() -> None:
    first = {"name": "a", "steps": 1, "overrides": ["precision=nvfp4", "precision.hidden=bf16"]}
    second = {"name": "b", "steps": 1, "overrides": ["precision=mxfp8"]}
    found = of(phases(first, second), "precision=fp8_block", "precision.bf16_last_layers=1")
    assert [cfg.precision.bf16_last_layers for cfg in found] == [1, 1]
    assert [cfg.precision.recipe for cfg in found] == ["nvfp4", "mxfp8"]


def test_tokens_are_steps_of_the_batches_of_their_phase() -> None:
    """4 sequences up to 4,096 tokens, then 8; the next phase has no smaller ones."""
    data = ["data.micro_batch=4", "data.global_batch=8", "data.batch_warmup=[4:4096]"]
    first, second = ({"name": name, "tokens": 10_000} for name in ("a", "b"))
    found = of(phases(first, second), *data)
    assert lengths(found) == [(1, 4 + 3), (8, 7 + 5)]
    assert [cfg.data.batch_warmup for cfg in found] == [["4:4096"], []]


def test_faults_and_traces_are_of_the_phase_of_their_step() -> None:
    found = of(
        phases({"name": "short", "steps": 10}, LONG),
        "run.inject=[nan@3,nan@15]",
        "run.profile=[12,13]",
    )
    assert [cfg.run.inject for cfg in found] == [["nan@3"], ["nan@3", "nan@15"]]
    assert [cfg.run.profile for cfg in found] == [[], [12, 13]]


@pytest.mark.parametrize(
    ("entries", "more", "said"),
    [
        ([LONG, LONG], [], "'long' is the name of two phases; give each one of its own"),
        ([{"steps": 1}], [], "phase 1 has no name"),
        ([{"name": "a"}], [], "phase a has steps=0 and tokens=0; set one above 0"),
        ([{"name": "a", "steps": 1, "tokens": 5}], [], "set one above 0"),
        ([{"name": "a", "steps": -1}], [], "phase a has steps=-1 and tokens=0"),
        ([{"name": "a", "steps": 1, "first": 3}], [], "first and schedule_begin follow from"),
        (
            [{"name": "a", "steps": 1, "overrides": ["run.steps=3"]}],
            [],
            "phase a overrides run.steps, which is the run's; set it there",
        ),
        (
            [{"name": "a", "steps": 1, "overrides": ["data.sequence=3"]}],
            [],
            "phase a: data.sequence: no such knob",
        ),
        (
            [{"name": "a", "steps": 1}, {"name": "b", "steps": 1, "overrides": ["optim.lr=0"]}],
            [],
            "phase b: optim.lr=0.0 must be above 0",
        ),
        (
            [LONG, {"name": "b", "steps": 1, "overrides": ["optim=muon"]}],
            [],
            "phase b: optim.kind=adamw may not become muon between phases",
        ),
        (
            [{"name": "a", "steps": 1}, {"name": "b", "steps": 1, "overrides": [WARM_UP]}],
            ["model=tiny_deepseek_v32"],
            "phase b: model.attention.sparse.phase=warm_up trains the indexer alone, before any ",
        ),
        ([LONG], ["run.save_interval=-1"], "saves no checkpoint, with which a phase begins"),
        ([LONG], ["run.inject=[nan@21]"], "phase long: run.inject=[nan@21] has 'nan@21'"),
        (
            [LONG, LONG | {"name": "b"}],
            ["data.batch_warmup=[4:1e9]"],
            "phase b: data.batch_warmup ends after the 40,960 tokens of the phases before",
        ),
    ],
)
def test_mistakes_are_lines(
    entries: list[dict[str, Any]], more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Ended) as ended:
        of(phases(*entries), *more)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err
    assert all(line.startswith("error: ") for line in err.splitlines())


@pytest.mark.parametrize("value", ["3", "[a]", "[{name:a,steps:x}]", "[{name:a,overrides:[a=b]}]"])
def test_a_value_of_another_form_is_told_its_form(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Ended):
        from_argv([f"run.phases={value}"])
    err = capsys.readouterr().err
    assert err.startswith(f"error: run.phases={value}: ") and err.count("\n") == 1
    (word,) = shlex.split(err.partition(", as in ")[2])
    assert lengths(of(word)) == [(1, 9), (10, 10)]


def test_a_check_looks_at_each_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data of the second is shorter than its sequences."""
    corpus = write_corpus(tmp_path / "text", [range(100)])
    data = [f"data.blend=[{corpus}]", f"data.cache={tmp_path}/cache", "data.split=1"]
    argv = [f"run.dir={tmp_path}", "data=indexed", "data.sequence_length=32", *data, "--check"]
    argv.append("model.vocab_size=256")
    short = {"name": "short", "steps": 1}
    assert main([*argv, phases(short, LONG)]) == 2
    err = capsys.readouterr().err
    assert "phase short: error" not in err
    assert "phase long: error: data.sequence_length=512 is longer than the data" in err
    fits = LONG | {"overrides": ["data.sequence_length=64"]}
    assert main([*argv, phases(short, fits)]) == 0


def test_a_dry_run_describes_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([phases({"name": "short", "steps": 10}, LONG), "run.dry_run=true"]) == 0
    out = capsys.readouterr().out
    first, second = out.split("phase long: steps 11 to 30\n")
    assert first.startswith("phase short: steps 1 to 10\n")
    assert "at sequence 256 " in first and "at sequence 512 " in second


def test_the_example_of_the_page_is_valid() -> None:
    (text,) = (text for text in blocks("yaml") if text.startswith("run:"))
    entries = yaml.safe_load(text)["run"]["phases"]
    found = of(phases(*entries), "data=indexed", "data.blend=[data/wiki]", "model.vocab_size=256")
    assert [cfg.data.sequence_length for cfg in found] == [256, 32768, 32768]
    assert found[0].run.steps * 256 * 32 >= 100e9 > (found[0].run.steps - 1) * 256 * 32


def test_deepseek_v3_is_a_list_of_phases(capsys: pytest.CaptureFixture[str]) -> None:
    """Valid on its 256 GPUs; 14.8 T tokens, and 1,000 steps of 63 M twice."""
    found = of("experiment=deepseek_v3_phases_256gpu", "run.dry_run=true")
    assert [cfg.run.phases[-1].name for cfg in found][-2:] == ["32k", "128k"]
    assert [cfg.data.sequence_length for cfg in found] == [4096] * 4 + [32768, 131072]
    assert [cfg.model.attention.yarn.factor for cfg in found] == [1] * 4 + [40] * 2
    assert [cfg.data.global_batch for cfg in found] == [15360] * 4 + [1920, 480]
    assert [cfg.optim.lr for cfg in found] == [2.2e-4, 2.2e-4, 2.2e-5, 7.3e-6, 7.3e-6, 7.3e-6]
    assert [last - first + 1 for first, last in lengths(found)[-2:]] == [1000, 1000]
    assert found[0].data.batch_warmup and not found[1].data.batch_warmup
