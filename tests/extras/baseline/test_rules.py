"""Rules of configurations with Megatron-Core's layer."""

from pathlib import Path

import pytest

from phalanx.configs.load import load
from tests.configs import test_validate

PROBLEMS = test_validate.table(Path(__file__).with_name("problems.md"))


@pytest.mark.parametrize(("overrides", "world", "problem", "fix"), PROBLEMS)
def test_problem_names_the_override_that_fixes_it(
    overrides: str, world: int, problem: str, fix: str
) -> None:
    test_validate.test_problem_names_the_override_that_fixes_it(overrides, world, problem, fix)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ("", 1),
        ("precision.grad_format=e5m2 precision.bf16_first_layers=1", 1),
        ("parallel.tensor=2", 2),
    ],
)
def test_sound_configurations_pass(overrides: str, world: int) -> None:
    cfg = load(["precision=fp8_block", "kernels=megatron", *overrides.split()])
    assert test_validate.problems(cfg, world) == []


@pytest.mark.parametrize("cases", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_named_overrides_together_always_fix_a_configuration(cases: int) -> None:
    backends = ("auto", "megatron", "megatron")
    ranges = test_validate.RANGES | {"kernels.backend": backends}
    test_validate.check_random_configurations(ranges, cases)
