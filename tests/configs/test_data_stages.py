"""data.stages: which texts are stages, and which stages a blend can have."""

import pytest

from phalanx.configs.arithmetic.data_stages import Stage, begun, parse
from phalanx.configs.load import load
from phalanx.configs.validate import ConfigError, validate
from tests.support.advice import advised, tried

TWO = ["data=indexed", "data.blend=[0.7,a,0.3,b]", "data.sequence_length=256"]


def test_a_stage_begins_with_the_next_whole_sample() -> None:
    stage = parse("1e3:0.25/0/2")
    assert stage == Stage(1000, (0.25, 0.0, 2.0))
    assert [stage.first(sequence) for sequence in (10, 256, 1000, 1001)] == [100, 4, 1, 1]
    assert parse("80e9:1/1").tokens == 80_000_000_000


def test_a_stage_has_begun_when_a_sample_of_it_is_read() -> None:
    texts = ["1000:1/1", "2000:1/2"]
    assert [len(begun(texts, samples, 100)) for samples in (10, 11, 20, 21)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1e3",
        "1e3:",
        ":1/1",
        "1e3:1//1",
        "1e3:1/-1",
        "-1e3:1/1",
        "1e3:a/b",
        "nan:1/1",
        "1e3:1,1",
    ],
)
def test_what_has_another_form(text: str) -> None:
    with pytest.raises(ValueError, match="as in 80e9:0.5/0.5"):
        parse(text)


@pytest.mark.parametrize("text", ["0:1/1", "0.4:1/1", "1e30:1/1"])
def test_a_stage_begins_within_a_run(text: str) -> None:
    with pytest.raises(ValueError, match="no number of tokens above 0"):
        parse(text)


def test_stages_need_no_brackets() -> None:
    assert load([*TWO, "data.stages=8e9:0.5/0.5"]).data.stages == ["8e9:0.5/0.5"]
    cfg = load([*TWO, "data.stages=8e9:0.5/0.5,9e9:0/1"])
    assert cfg.data.stages == ["8e9:0.5/0.5", "9e9:0/1"]
    validate(cfg, 1)


@pytest.mark.parametrize(
    ("stages", "why", "kept"),
    [
        ("8e9:1", "'8e9:1', which has 1 weight for 2 sources of data.blend", []),
        ("8e9:0/0", "'8e9:0/0', which gives no source a weight above 0", []),
        ("9e9:1/1,8e9:1/0", "'8e9:1/0', which does not begin after the stage", ["9e9:1/1"]),
        ("3:1/1,9:1/0", "'9:1/0', which does not begin after the stage before it", ["3:1/1"]),
        ("soon:1/1", "'soon:1/1', which is not <tokens>:<weight>/<weight>", []),
    ],
)
def test_a_stage_that_cannot_be_is_one_line(stages: str, why: str, kept: list[str]) -> None:
    given = [*TWO, f"data.stages={stages}"]
    with pytest.raises(ConfigError) as caught:
        validate(load(given), 1)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("data.stages=") and why in line
    (advice,) = advised(line)
    assert tried(given, advice).data.stages == kept


@pytest.mark.parametrize("data", [[], ["data=indexed", "data.blend=[a]"], ["data=synthetic"]])
def test_one_source_has_no_stages(data: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load([*data, "data.stages=8e9:1/1"]), 1)
    assert str(caught.value) == (
        "data.stages=[8e9:1/1] changes the weights of two or more sources of data.blend; set "
        "data.stages='[]'"
    )


def test_a_source_that_no_stage_reads_is_a_mistake() -> None:
    given = ["data=indexed", "data.blend=[1,a,0,b]", "data.stages=8e9:1/0"]
    with pytest.raises(ConfigError, match="has b, which no stage reads") as caught:
        validate(load(given), 1)
    (advice,) = advised(str(caught.value))
    assert tried(given, advice).data.blend == ["1", "a", "1", "b"]
    validate(load([*given[:2], "data.stages=8e9:0/1"]), 1)
