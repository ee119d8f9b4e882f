"""Rules of configurations with sparse attention, and how its knob is written."""

from pathlib import Path

import pytest

from phalanx.configs.knobs import overrides
from phalanx.configs.load import load
from phalanx.configs.validate import ConfigError
from tests.configs import test_validate

PROBLEMS = test_validate.table(Path(__file__).with_name("problems.md"))
KNOB = "model.attention.sparse"


@pytest.mark.parametrize(("words", "world", "problem", "fix"), PROBLEMS)
def test_problem_names_the_override_that_fixes_it(
    words: str, world: int, problem: str, fix: str
) -> None:
    test_validate.test_problem_names_the_override_that_fixes_it(words, world, problem, fix)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        ([f"{KNOB}.top_k=8"], {"top_k": 8}),
        ([f"{KNOB}={{top_k:8,phase:warm_up}}"], {"top_k": 8, "phase": "warm_up"}),
        ([f"{KNOB}={{dim:32}}", f"{KNOB}.heads=2"], {"dim": 32, "heads": 2}),
    ],
)
def test_fields_are_set_one_by_one_or_together(words: list[str], expected: object) -> None:
    found = load(["model=tiny_deepseek", *words]).model.attention.sparse
    assert found == expected
    written = overrides({KNOB: found}).replace("'", "")  # as a shell hands it over
    assert load(["model=tiny_deepseek", written]).model.attention.sparse == expected


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (f"{KNOB}=4", "expected fields, as in model.attention.sparse='{}'"),
        (f"{KNOB}=[8]", "model.attention.sparse: Cannot merge"),
        (f"{KNOB}={{top_k:8", "cannot be read"),
    ],
)
def test_what_has_no_fields_is_told_in_a_line(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        load(["model=tiny_deepseek", word])
    assert said in str(error.value)
