"""Values that ranks must share: what is told of those that differ, and that all hear the same."""

import pytest
import torch.distributed as dist

from phalanx.parallel.fault.same_settings import Settings, compare, differences, ranges, settings_of
from tests.support.distributed import run_distributed


def of(host: str, **values: str) -> Settings:
    return Settings(host, settings_of(values, {}).marks, values)


def test_equal_values_have_no_difference() -> None:
    assert differences([of("a", lr="1", seed="2"), of("b", lr="1", seed="2")]) == []


def test_a_difference_names_values_hosts_and_ranks() -> None:
    everyone = [of("a", lr="1", seed="3")] * 2 + [of("b", lr="2", seed="3")] * 2
    (found,) = differences([*everyone, of("c", lr="1", seed="3")])
    assert str(found) == "lr is 1 on a, c (ranks 0-1, 4) and 2 on b (ranks 2-3)"


def test_a_name_that_only_some_ranks_know_is_a_difference() -> None:
    (found,) = differences([of("a", lr="1"), of("b", lr="1", momentum="2")])
    assert str(found) == "momentum is unknown on a (rank 0) and 2 on b (rank 1)"


def test_many_values_and_hosts_stay_one_short_line() -> None:
    same = [of(f"n{i}", lr="x" * 500) for i in range(5)]
    (found,) = differences([*same, *(of(f"m{i}", lr=str(i)) for i in range(4))])
    assert "on n0, n1, n2 and 2 more (ranks 0-4) and 0 on m0 (rank 5) and" in str(found)
    assert str(found).endswith(" and 2 more values") and len(str(found)) < 250


def test_marks_are_of_the_values_and_not_of_what_is_shown() -> None:
    """Two secrets are both shown as ***."""
    one, other = (settings_of({"key": f"secret {n}"}, {"key": "***"}) for n in (1, 2))
    (found,) = differences([one, other])
    assert "*** on" in str(found) and "secret" not in str((one, other, found))


def on_ranks(same: bool) -> tuple[list[str], bool]:
    rank, asked = dist.get_rank(), []
    values = {"a": "1", "b": "2" if same else str(rank)}

    def shown() -> dict[str, str]:
        asked.append(rank)
        return values

    store = dist.distributed_c10d._get_default_store()
    found = compare(store, rank, dist.get_world_size(), values, shown)
    return [one.name for one in found], bool(asked)


@pytest.mark.dist
@pytest.mark.parametrize(("same", "expected"), [(True, ([], False)), (False, (["b"], True))])
def test_every_rank_hears_the_same(same: bool, expected: tuple[list[str], bool]) -> None:
    assert run_distributed(on_ranks, 4, same) == [expected] * 4


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and ranges([3]) == "3"
