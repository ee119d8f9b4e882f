"""Rules of `parallel.context_exchange`."""

from pathlib import Path

import pytest

from tests.configs import test_validate
from tests.support.scheduling import slow

PROBLEMS = test_validate.table(Path(__file__).with_name("problems.md"))


@pytest.mark.parametrize(("overrides", "world", "problem", "fix"), PROBLEMS)
def test_problem_names_the_override_that_fixes_it(
    overrides: str, world: int, problem: str, fix: str
) -> None:
    test_validate.test_problem_names_the_override_that_fixes_it(overrides, world, problem, fix)


@pytest.mark.parametrize("cases", [50, *slow(1000)])
def test_the_named_overrides_together_always_fix_a_configuration(cases: int) -> None:
    ranges = test_validate.RANGES | {
        "parallel.context_exchange": ("heads",),
        "parallel.context": (1, 2, 3, 4, 6, 8),
        "model.attention.kv_heads": (1, 2, 4),
    }
    test_validate.check_random_configurations(ranges, cases)
