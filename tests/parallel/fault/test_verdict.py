"""Attribution of a failure, from the messages that rank 0 received."""

from typing import Any

import pytest

from phalanx.parallel.fault.verdict import Member, Verdict, Where, blame

NOW, TIMEOUT = 1000.0, 60.0


def job(**changes: dict[str, Any]) -> dict[int, Member]:
    """Four ranks that are well, but for the changes: `r2={"gone": 999.0}`."""
    members = {}
    for rank in range(4):
        where = Where(rank, "node", 100 + rank, 0.0)
        state = {"at": "step 7: data", "serial": 50, "since": NOW - 0.1, "limited": True}
        changed = changes.get(f"r{rank}", {})
        members[rank] = Member(where, **{"heard": NOW - 0.2, **state, **changed})
    return members


def verdict(**changes: dict[str, Any]) -> Verdict | None:
    return blame(job(**changes), NOW, TIMEOUT)


LOST = {"failed": NOW - 3}
OWN = {"failed": NOW - 3, "own": True}


@pytest.mark.parametrize(
    ("changes", "rank", "kind"),
    [
        # One is dead. The collectives of the others break.
        ({"r2": {"gone": NOW - 3}}, 2, "died"),
        ({"r2": {"gone": NOW - 3}, "r0": {"failed": NOW - 2.9}}, 2, "died"),
        ({"r2": {"gone": NOW - 3}, "r1": {"gone": NOW - 2.9}}, 2, "died"),
        # The launcher ends the others as soon as one has failed or died.
        ({"r3": {"failed": NOW - 3, "own": True}, "r0": {"gone": NOW - 2.9}}, 3, "failed"),
        ({"r3": {"gone": NOW - 3}, "r0": {"failed": NOW - 2.9, "own": True}}, 3, "died"),
        # An error of one, and one that all had.
        ({"r2": OWN}, 2, "failed"),
        ({"r2": OWN, "r1": LOST}, 2, "failed"),
        ({f"r{rank}": {"failed": NOW - rank, "own": True} for rank in range(4)}, 0, "failed"),
        # No heartbeats.
        ({"r1": {"heard": NOW - 61}}, 1, "silent"),
        ({"r1": {"heard": NOW - 30}, "r0": LOST, "r2": LOST}, 1, "silent"),
        ({"r1": {"heard": NOW - 59.9, "since": NOW - 60, "serial": 49}}, 1, "silent"),
        # No progress.
        ({"r1": {"since": NOW - 61, "serial": 49}}, 1, "stuck"),
        ({"r1": {"serial": 49}, "r0": LOST, "r2": LOST}, 1, "stuck"),
        (
            {f"r{r}": {"since": NOW - 61, "serial": 52 if r != 3 else 51} for r in range(4)},
            3,
            "stuck",
        ),
        ({f"r{r}": {"since": NOW - 61 - r} for r in range(4)}, 3, "broken"),
        ({"r0": LOST}, 1, "broken"),
        # All but one have said that they wait.
        ({"r0": LOST, "r1": LOST, "r3": LOST}, 2, "stuck"),
        # It waited on its device for one whose host is no further, or a little further.
        ({"r0": LOST | {"serial": 49}}, 1, "broken"),
        ({"r0": LOST | {"serial": 49}, "r3": {"serial": 48}}, 3, "stuck"),
    ],
)
def test_who_is_at_fault(changes: dict[str, Any], rank: int, kind: str) -> None:
    found = verdict(**changes)
    assert found is not None and (found.where.rank, found.kind) == (rank, kind)
    assert kind == "broken" or f"rank {rank} (node, pid {100 + rank})" in found.text
    assert "step 7: data" in found.text


def test_the_first_that_could_not_go_on_says_why() -> None:
    late = {"failed": NOW - 3, "reason": "rank 1 has not reached exchange 7"}
    found = verdict(r2=late, r0={"failed": NOW - 2, "reason": "Connection closed by peer"})
    assert found is not None and found.text == (
        "all ranks are stuck in step 7: data; rank 1 has not reached exchange 7"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"r1": {"heard": NOW - 59}},
        {"r1": {"since": NOW - 59}},
        {"r1": {"since": NOW - 600, "limited": False}},  # compiles
        {"r1": {"heard": NOW - 600, "left": True}},
        {f"r{rank}": {"left": True} for rank in range(4)},
        # Bad news, but the others' may still come in.
        {"r1": {"failed": NOW - 0.2}},
        {"r1": {"gone": NOW - 0.2}},
        {"r1": {"failed": NOW - 1, "own": True}},
        {"r1": {"failed": NOW - 0.7}, "r2": {"heard": NOW - 0.8}},  # is it stopped?
    ],
)
def test_when_all_is_well_or_too_little_is_known(changes: dict[str, Any]) -> None:
    assert verdict(**changes) is None


def test_nothing_is_known_of_ranks_that_have_not_come() -> None:
    assert blame({}, NOW, TIMEOUT) is None
