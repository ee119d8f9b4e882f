"""Rules of configurations with linear attention."""

from pathlib import Path

import pytest

from tests.configs import test_validate

PROBLEMS = test_validate.table(Path(__file__).with_name("problems.md"))


@pytest.mark.parametrize(("overrides", "world", "problem", "fix"), PROBLEMS)
def test_problem_names_the_override_that_fixes_it(
    overrides: str, world: int, problem: str, fix: str
) -> None:
    test_validate.test_problem_names_the_override_that_fixes_it(overrides, world, problem, fix)


@pytest.mark.parametrize("cases", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_named_overrides_together_always_fix_a_configuration(cases: int) -> None:
    at = "model.linear_attention"
    ranges = test_validate.RANGES | {
        f"{at}.full_attention_interval": (2, 9),
        f"{at}.key_heads": (1, 2, 3),
        f"{at}.value_heads": (2, 4, 5),
        "kernels.backend": ("auto", "torch", "megatron"),
    }
    test_validate.check_random_configurations(ranges, cases)
