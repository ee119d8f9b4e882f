"""Which transport is taken and why: the rules, the agreement of ranks, and what the page says."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phalanx.configs.schema import ParallelConfig
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.parallel.dispatcher.transport import (
    LOCAL,
    choices,
    choose_transport,
    own_exchange,
    replication_off,
    resolve,
    sms_of,
)
from phalanx.parallel.dispatcher.transport_class import Rank, Transport
from phalanx.parallel.megatron import cpu
from tests.support.additions import COUNTING_TRANSPORTS
from tests.support.advice import advised
from tests.support.distributed import run_distributed
from tests.support.training import pretended_nodes

BF16 = torch.bfloat16
NO_PEER = "the GPUs of a host cannot write to each other's memory"
NO_GAIN = "replicas cost a step more than they save where ranks are nearly even"


def ranks(nodes: str, symm: Sequence[str] = (), broadcasts: Sequence[str] = ()) -> list[Rank]:
    """A rank for each letter, which names its host; with reasons, if any, by rank."""
    reasons = {"symm": symm, "broadcasts": broadcasts}
    return [
        Rank(i, host, host, {name: given[i] or None for name, given in reasons.items() if given})
        for i, host in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("given", "name", "reason"),
    [
        (ranks("a"), "local", "auto; all experts are on one rank"),
        (ranks("aa"), "symm", "auto"),
        (
            ranks("aa", ["needs CUDA"] * 2),
            "alltoall",
            "auto; not symm: needs CUDA; not hier: all ranks are on one node",
        ),
        (
            ranks("aaaa", ["", "broken", "", "broken"]),
            "alltoall",
            "auto; not symm: broken (rank 1 on a and 1 more); not hier: all ranks are on one node",
        ),
        (
            ranks("aabb"),
            "hier",
            "auto; not symm: the ranks of an expert-parallel group are on several hosts",
        ),
    ],
)
def test_auto_says_what_it_took_and_why(given: list[Rank], name: str, reason: str) -> None:
    taken = resolve("auto", given)
    assert (taken.name, taken.reason) == (name, reason)


def test_inside_of_nodes_a_reason_of_one_rank_is_that_of_all_nodes() -> None:
    assert resolve("hier", ranks("aabb")).inside == Transport("symm", "auto")
    inside = resolve("hier", ranks("aabb", ["", "", "", NO_PEER])).inside
    assert inside == Transport("alltoall", f"auto; not symm: {NO_PEER} (rank 3 on b)")


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize(
    ("wanted", "given", "said"),
    [
        ("symm", ranks("aa", ["", NO_PEER]), f"{NO_PEER} (rank 1 on a)"),
        ("symm", ranks("ab"), "on several hosts"),
        (
            "broadcasts",
            ranks("aa", broadcasts=["", "needs a network"]),
            "needs a network (rank 1 on",
        ),
        ("broadcasts", ranks("a"), "needs several ranks"),
        ("hier", ranks("abab"), "the ranks of a node do not follow one another"),
    ],
)
def test_a_forced_transport_that_one_rank_lacks_is_refused(
    wanted: str, given: list[Rank], said: str
) -> None:
    with pytest.raises(ValueError, match="set parallel.dispatch=auto") as error:
        resolve(wanted, given)
    assert advised(str(error.value)) == [["parallel.dispatch=auto"]]
    assert resolve("auto", given).name in TRANSPORTS
    assert said in str(error.value) and "\n" not in str(error.value)


# --- ranks that are not alike ---------------------------------------------------------------------


def _hopper_without_peers(monkeypatch: pytest.MonkeyPatch, broken: Sequence[int]) -> None:
    """This process looks like one of two Hopper GPUs; those of `broken` ranks reach no other."""
    rank = dist.get_rank()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: rank not in broken)


def _chosen(wanted: str, broken: Sequence[int], size: int) -> tuple[str, str, str]:
    """Transport, the one in its nodes, and the last reason; or what was raised."""
    with pytest.MonkeyPatch.context() as patch, pretended_nodes(size):
        _hopper_without_peers(patch, broken)
        try:
            taken = choose_transport(wanted, dist.group.WORLD, BF16)
        except ValueError as error:
            return "refused", "", str(error)
        inside = taken.inside
        return taken.name, inside.name if inside else "", (inside or taken).reason


def _uneven_ranks() -> list[tuple[str, str, str]]:
    every = [("auto", (), 4), ("auto", (1,), 4), ("symm", (2,), 4), ("hier", (), 2)]
    return [_chosen(*case) for case in (*every, ("hier", (3,), 2))]


@pytest.mark.dist
def test_ranks_take_the_same_transport_though_one_cannot_reach_its_peers() -> None:
    answers = run_distributed(_uneven_ranks, 4, timeout=60)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    whole, broken, forced, nodes, broken_nodes = answers[0]
    assert whole == ("symm", "", "auto")
    assert broken[0] == "alltoall" and f"not symm: {NO_PEER} (rank 1 on " in broken[2]
    assert forced[0] == "refused" and f"{NO_PEER} (rank 2 on " in forced[2]
    assert nodes == ("hier", "symm", "auto")
    assert broken_nodes[:2] == ("hier", "alltoall") and "(rank 3 on " in broken_nodes[2]


HIER = "hier with alltoall in its nodes"
ALONE = (
    "parallel.dispatch=hier cannot run in the group of 2 ranks from rank 0: "
    "all ranks are on one node; set parallel.dispatch=auto"
)
OVER_NODES = {
    # Layout of four ranks -> with `hier` on nodes of two ranks, and with nodes of one.
    "parallel.tensor=2 parallel.expert=2": (ALONE, HIER),
    "parallel.context=2 parallel.expert=2": (ALONE, HIER),
    "parallel.pipeline=2 parallel.expert=2": (ALONE, HIER),
    "parallel.expert=2": (ALONE, HIER),
    "parallel.tensor=2 parallel.expert=4": (HIER, HIER),
    "parallel.context=2 parallel.expert=4": (HIER, HIER),
    "parallel.expert=4": (HIER, HIER),
}


def _over_nodes() -> dict[str, tuple[str, ...]]:
    cpu.install()
    from phalanx.parallel.groups import create

    def chosen(size: int, group: dist.ProcessGroup) -> str:
        with pretended_nodes(size):
            try:
                taken = choose_transport("hier", group, BF16)
            except ValueError as error:
                return str(error)
        assert taken.inside is not None
        dist.all_reduce(torch.ones(1), group=taken.nodes.rail)
        return f"{taken.name} with {taken.inside.name} in its nodes"

    found = {}
    for layout in OVER_NODES:
        sizes = dict(word.removeprefix("parallel.").split("=") for word in layout.split())
        group = create(**{name: int(size) for name, size in sizes.items()}).pg.ep
        found[layout] = tuple(chosen(size, group) for size in (2, 1))
    return found


@pytest.mark.dist
def test_a_layout_over_nodes_runs_or_is_refused_by_its_group() -> None:
    """The job is on two nodes or four in each case; a group of it may be on one."""
    for found in run_distributed(_over_nodes, 4, timeout=120):
        assert found == OVER_NODES


def _groups_that_differ() -> Transport:
    """Two expert-parallel groups of two ranks, the second of which has a rank without peers."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with pytest.MonkeyPatch.context() as patch:
        _hopper_without_peers(patch, [3])
        return choose_transport("auto", halves[dist.get_rank() // 2], BF16)


@pytest.mark.dist
def test_groups_that_differ_are_told() -> None:
    first, second, third, fourth = run_distributed(_groups_that_differ, 4, timeout=60)
    assert first == second and third == fourth
    assert (first.name, third.name) == ("symm", "alltoall")
    told = "auto; 1 of 2 groups differ: that of rank 2 takes alltoall (not symm: " + NO_PEER
    assert first.reason.startswith(told)
    assert third.reason.endswith("1 of 2 groups differ: that of rank 0 takes symm (auto)")


# --- what the start page says ---------------------------------------------------------------------


def overlap(
    transport: Transport,
    backend: str = "fused",
    sms: int | str = 16,
    shared: bool = False,
    quantizes: bool = False,
) -> tuple[str, str]:
    how = dict(backend=backend, shared=shared, quantizes=quantizes)
    line = choices(transport, ParallelConfig(comm_sms=sms), **how)[-1]
    assert line.op == "overlap"
    return line.backend, line.reason


SYMM, HIER = Transport("symm", "auto"), Transport("hier", "auto", Transport("symm", "auto"))
DENSE = Transport("alltoall", "auto")
DENSE_NODES = Transport("hier", "auto", DENSE)
UNUSED = "parallel.comm_sms=16 is not in effect"


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize(
    ("given", "state", "reason"),
    [
        (dict(transport=SYMM), "16 SMs", "parallel.comm_sms=16"),
        (dict(transport=SYMM, sms=0), "off", "parallel.comm_sms=0"),
        (dict(transport=SYMM, sms="auto"), "16 SMs", "auto"),
        (
            dict(transport=SYMM, sms="auto", quantizes=True),
            "off",
            "experts quantise tokens once all have arrived (precision.dispatch=bf16)",
        ),
        (
            dict(transport=HIER, sms="auto"),
            "16 SMs",
            "auto; inside nodes only: the exchange between nodes is exposed",
        ),
        (
            dict(transport=SYMM, backend="torch", sms="auto", shared=True),
            "off",
            "torch experts cannot wait for tokens",
        ),
        (
            dict(transport=Transport("alltoall", "auto"), sms="auto"),
            "off",
            "alltoall cannot overlap: it is over when it returns",
        ),
        (
            dict(transport=Transport("hier", "auto", Transport("alltoall", "")), sms="auto"),
            "off",
            "alltoall cannot overlap: it is over when it returns",
        ),
        (
            dict(transport=Transport("broadcasts", ""), sms="auto"),
            "off",
            "broadcasts are over when they return",
        ),
        (dict(transport=LOCAL, sms="auto"), "off", "nothing is exchanged"),
        (
            dict(transport=own_exchange("megatron", "auto"), backend="megatron", sms="auto"),
            "off",
            "Megatron-Core's layer waits for its exchanges",
        ),
        (
            dict(transport=SYMM, backend="torch"),
            "off",
            f"torch experts cannot wait for tokens; {UNUSED}",
        ),
        (
            dict(transport=SYMM, backend="torch", sms=0),
            "off",
            "torch experts cannot wait for tokens",
        ),
        (
            dict(transport=SYMM, backend="torch", shared=True),
            "16 SMs",
            "parallel.comm_sms=16; with the shared experts only: "
            "torch experts cannot wait for tokens",
        ),
        (
            dict(transport=HIER, shared=True),
            "16 SMs",
            "parallel.comm_sms=16; inside nodes only: the exchange between nodes is beside the "
            "shared experts",
        ),
        (
            dict(transport=Transport("alltoall", "auto")),
            "off",
            f"alltoall cannot overlap: it is over when it returns; {UNUSED}",
        ),
        (dict(transport=LOCAL, sms=0), "off", "nothing is exchanged"),
        (
            dict(transport=Transport("broadcasts", "")),
            "off",
            "broadcasts are over when they return; "
            "parallel.comm_sms=16 sets the SMs of its kernels",
        ),
        (
            dict(transport=own_exchange("megatron", "auto"), backend="megatron"),
            "off",
            f"Megatron-Core's layer waits for its exchanges; {UNUSED}",
        ),
    ],
)
def test_overlap_is_on_or_off_and_says_why(given: Any, state: str, reason: str) -> None:
    assert overlap(**given) == (state, reason)
    asked, backend = given.get("sms", 16), given.get("backend", "fused")
    sms = sms_of(asked, given["transport"], backend, given.get("quantizes", False))
    assert given.get("sms") != "auto" or state == (f"{sms} SMs" if sms else "off")


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize(
    ("wanted", "transport", "reason"),
    [
        ("auto", SYMM, f"auto; {NO_GAIN}"),
        ("auto", HIER, f"auto; {NO_GAIN}"),
        ("auto", DENSE, "auto; alltoall does not hide the exchange of replicas"),
        ("auto", DENSE_NODES, "auto; alltoall does not hide the exchange of replicas"),
        ("auto", Transport("broadcasts", ""), "auto; broadcasts cannot replicate experts"),
        (2, LOCAL, "all experts are on one rank; parallel.expert_replication=2"),
    ],
)
def test_why_no_experts_are_replicated(
    wanted: int | str, transport: Transport, reason: str
) -> None:
    line = replication_off(wanted, transport)
    assert (line.op, line.backend, line.reason) == ("replication", "off", reason)
