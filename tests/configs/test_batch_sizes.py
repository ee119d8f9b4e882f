"""data.batch_warmup, and ends of the schedule in tokens: sizes of steps, steps of tokens."""

import pytest

from phalanx.configs.arithmetic.batch_sizes import (
    BatchSize,
    in_steps,
    parse,
    samples_after,
    size_at,
    spans,
    steps_to,
)
from phalanx.configs.knobs import changed
from phalanx.configs.layout import fit_to_ranks
from phalanx.configs.load import load
from phalanx.configs.schema import Config, DataConfig, OptimConfig
from phalanx.configs.validate import ConfigError, validate
from tests.support.advice import advised, tried

DATA = DataConfig(sequence_length=10, global_batch=8, batch_warmup=["2:45", "4:200"])
SIZES = [2, 2, 2, 4, 4, 4, 4, 8, 8, 8]
"""Sizes of the steps of `DATA`: the first three end after 6 samples, the next four after 22."""


def test_a_step_has_the_size_of_the_cursor_at_its_start() -> None:
    cursor, sizes = 0, []
    for _ in SIZES:
        sizes.append(size_at(spans(DATA), cursor))
        cursor += sizes[-1]
    assert sizes == SIZES
    assert size_at(spans(DataConfig(global_batch=3)), 10**12) == 3


def test_steps_and_samples_are_those_of_the_sizes() -> None:
    cursors = [sum(SIZES[:n]) for n in range(len(SIZES) + 1)]
    assert [samples_after(DATA, n) for n in range(len(cursors))] == cursors
    for done, cursor in enumerate(cursors):
        assert samples_after(DATA, len(SIZES) - done, cursor) == cursors[-1]
    assert samples_after(DATA, 10**12) == 22 + 8 * (10**12 - 7)
    for tokens in range(1, 10 * cursors[-1] + 1):
        first = next(n for n, cursor in enumerate(cursors) if 10 * cursor >= tokens)
        assert steps_to(DATA, tokens) == first
    plain = DataConfig(sequence_length=10, global_batch=8)
    assert [steps_to(plain, tokens) for tokens in (1, 80, 81, 8e9)] == [1, 1, 2, 10**8]


def test_ends_in_tokens_are_steps() -> None:
    optim = OptimConfig(warmup_steps=5, decay_steps=9)
    assert in_steps(optim, DATA) == optim
    given = OptimConfig(warmup_steps=5, warmup_tokens=220.0, decay_tokens=221.0)
    steps = in_steps(given, DATA)
    assert (steps.warmup_steps, steps.decay_steps) == (7, 8)
    assert in_steps(steps, DATA) == steps


@pytest.mark.parametrize("text", ["", "64", "64:", ":1e9", "6.4:1e9", "-64:1e9", "64:x", "٦:1e9"])
def test_what_has_another_form(text: str) -> None:
    with pytest.raises(ValueError, match="as in 64:1e9"):
        parse(text)


def test_a_size_and_its_tokens() -> None:
    assert parse("64:1.5e9") == BatchSize(64, 1_500_000_000)
    for text in ("0:1e9", "64:0", "64:1e30"):
        with pytest.raises(ValueError, match="above 0"):
            parse(text)
    assert load(["data.batch_warmup=64:1e9"]).data.batch_warmup == ["64:1e9"]
    assert load(["data.batch_warmup=64:1e9,128:3e9"]).data.batch_warmup == ["64:1e9", "128:3e9"]


@pytest.mark.parametrize(
    ("given", "why", "kept"),
    [
        ("8:1e9,16:1e9", "'16:1e9', which does not end after the size before it", ["8:1e9"]),
        ("x", "'x', which is not <sequences>:<tokens>, as in 64:1e9", []),
        ("6:1e9,8:2e9", "is no multiple of micro_batch=4 x 1 data", ["8:1e9", "8:2e9"]),
    ],
)
def test_a_warmup_that_cannot_be_is_one_line(given: str, why: str, kept: list[str]) -> None:
    words = [f"data.batch_warmup={given}"]
    with pytest.raises(ConfigError) as caught:
        validate(load(words), 1)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("data.batch_warmup=") and why in line
    (advice,) = advised(line)
    assert tried(words, advice).data.batch_warmup == kept


def test_sizes_of_a_warmup_fit_the_stages_and_ranks() -> None:
    words = ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "data.batch_warmup=4:1e6"]
    with pytest.raises(ConfigError, match="x 2 data parallel ranks x pipeline=2; set") as caught:
        validate(load(words), 4)
    (advice,) = advised(str(caught.value))
    assert advice == ["data.batch_warmup=[16:1e6]"]
    cfg = load([*words[:2], *advice])
    validate(cfg, 4)
    sizes = fit_to_ranks(cfg, 48)
    assert sizes is not None
    fitted = changed(cfg, sizes)
    assert fitted.data.batch_warmup != ["16:1e6"]
    validate(fitted, 48)


def schedule(*words: str) -> Config:
    """Steps of 8,192 tokens."""
    return load(["data.sequence_length=256", "data.global_batch=32", "run.steps=100", *words])


@pytest.mark.parametrize(
    ("words", "why", "advice"),
    [
        (
            ["optim.warmup_tokens=81920", "optim.decay_steps=10"],
            "optim.decay_steps=10 ends within the warm-up of 10 steps",
            ["optim.decay_steps=11"],
        ),
        (
            ["optim.warmup_tokens=81921", "optim.decay_tokens=9e4"],
            "optim.decay_tokens=90000.0 ends within the warm-up of 11 steps",
            ["optim.decay_tokens=98304.0"],
        ),
        (
            ["optim.warmup_tokens=8e5", "optim.schedule=WSD"],
            "optim.warmup_tokens=800000.0 reaches into the last tenth of 100 steps",
            ["optim.warmup_tokens=737280.0"],
        ),
        (
            ["optim.decay_tokens=8e5", "optim.decay_steps=50"],
            "optim.decay_steps=50 is not possible with decay_tokens=800000",
            ["optim.decay_steps=0"],
        ),
    ],
)
def test_ends_in_tokens_that_meet_are_refused(
    words: list[str], why: str, advice: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(schedule(*words), 1)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(why) and advised(line) == [advice]
    validate(schedule(*words, *advice), 1)
