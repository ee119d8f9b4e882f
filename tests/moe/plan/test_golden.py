"""Plans of the experiments are those that the file has."""

from pathlib import Path

from tests.moe.plan.golden import lines


def test_plans_of_all_experiments_are_those_of_the_file() -> None:
    known = Path(__file__).with_name("golden.txt").read_text().splitlines()
    found = list(lines())
    assert len(found) > 200
    assert found == known
