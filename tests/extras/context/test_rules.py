"""Rules of context ranks, and which exchange they take."""

from pathlib import Path

import pytest

from phalanx.configs.layout import context_exchange
from phalanx.configs.load import load
from tests.configs import test_validate
from tests.extras.planner.pages import page
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
        "kernels.attention": ("auto", "fa4", "te", "flex"),
        "parallel.context": (1, 2, 3, 4, 6, 8),
        "model.attention.kv_heads": (1, 2, 4),
    }
    test_validate.check_random_configurations(ranges, cases)


def test_a_dry_run_says_what_is_exchanged() -> None:
    recipe = "experiment=qwen3_30b_128k_8gpu"
    assert "exchange heads: each has some of them, of whole seq" in page(recipe, world=8)[0]
    whole = ["data.document_mask=false", "data.max_documents=0"]
    assert "exchange keys: each has those of whole sequences" in page(recipe, *whole, world=8)[0]


QWEN3, V3 = "model=qwen3_30b_a3b", "model=deepseek_v3"
MASK = "data.document_mask=true"


@pytest.mark.parametrize(
    ("overrides", "exchange"),
    [
        ([QWEN3, "parallel.context=8"], "keys"),
        ([QWEN3, "parallel.context=16"], "heads"),  # of fewer bytes
        ([QWEN3, "parallel.context=8", MASK], "heads"),  # which documents leave even
        ([QWEN3, "parallel.context=8", MASK, "parallel.tensor=8"], "keys"),  # of four heads
        ([QWEN3, "parallel.context=8", MASK, "kernels.attention=te"], "keys"),  # a ring of its own
        ([QWEN3, "parallel.context=3", MASK], "keys"),
        ([V3, "parallel.context=2"], "keys"),  # as many bytes
        ([V3, "parallel.context=4"], "heads"),
        ([QWEN3, MASK], "keys"),  # nothing to exchange
    ],
)
def test_ranks_take_the_exchange_that_suits_them(overrides: list[str], exchange: str) -> None:
    assert context_exchange(load(overrides)) == exchange
