"""Values that all ranks must share, compared before they have process groups.

Ranks with different settings, code or libraries make a model of neither, or wait for each other in
collectives that never meet. Every rank writes a digest of its values to the job's store, and rank 0
compares them; only if they differ does anybody write more. Values that are known later, when there
are groups, are compared by `differences` alone.
"""

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

_FEW = 3  # values, and hosts of one value, that a message has
_LONGEST = 80  # characters of a value in a message


@dataclass(frozen=True)
class Settings:
    """The values of one rank."""

    host: str
    marks: dict[str, str]  # digest of each value, by name
    shown: dict[str, str]  # each value as a user reads it


@dataclass(frozen=True)
class Difference:
    """A name for which ranks have different values."""

    name: str
    text: str  # values, hosts and ranks

    def __str__(self) -> str:
        return f"{self.name} is {self.text}"


def settings_of(values: Mapping[str, str], shown: Mapping[str, str]) -> Settings:
    """The values of this rank, on this host; `shown` are the same for users, without secrets."""
    marks = {name: _digest(value) for name, value in values.items()}
    return Settings(socket.gethostname(), marks, dict(shown))


def compare(
    store: dist.Store,
    rank: int,
    world: int,
    values: Mapping[str, str],
    shown: Callable[[], Mapping[str, str]],
) -> list[Difference]:
    """Differences between the values of all ranks, the same list on each of them. Collective.

    `shown` gives the values for users, without secrets; it is called if there is a difference.
    """
    store.set(f"settings/{rank}", _digest(json.dumps(values, sort_keys=True)))
    if rank == 0:
        equal = len({store.get(f"settings/{other}") for other in range(world)}) == 1
        store.set("settings", json.dumps(equal))
    if json.loads(store.get("settings")):
        return []
    store.set(f"settings/{rank}/values", json.dumps(asdict(settings_of(values, shown()))))
    if rank == 0:
        everyone = [json.loads(store.get(f"settings/{other}/values")) for other in range(world)]
        found = differences([Settings(**one) for one in everyone])
        store.set("settings/found", json.dumps([asdict(one) for one in found]))
    return [Difference(**one) for one in json.loads(store.get("settings/found"))]


def differences(everyone: Sequence[Settings]) -> list[Difference]:
    """Names for which ranks have different values, in the order of rank 0."""
    names = dict.fromkeys(name for one in everyone for name in one.marks)
    found = []
    for name in names:
        ranks: dict[str | None, list[int]] = {}
        for rank, one in enumerate(everyone):
            ranks.setdefault(one.marks.get(name), []).append(rank)
        if len(ranks) > 1:
            parts = [_part(name, same, everyone) for same in list(ranks.values())[:_FEW]]
            more = [f"{len(ranks) - _FEW} more values"] if len(ranks) > _FEW else []
            found.append(Difference(name, " and ".join(parts + more)))
    return found


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as `0-7, 16`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _part(name: str, ranks: Sequence[int], everyone: Sequence[Settings]) -> str:
    """`0.001 on node0, node1 (ranks 0-15)`."""
    value = everyone[ranks[0]].shown.get(name, "unknown")
    value = value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
    hosts = list(dict.fromkeys(everyone[rank].host for rank in ranks))
    more = f" and {len(hosts) - _FEW} more" if len(hosts) > _FEW else ""
    where = f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
    return f"{value} on {', '.join(hosts[:_FEW])}{more} ({where})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
