"""Parts of the check that need no other process: pairs of nodes, the driver's words, clocks."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.scripts.check_cluster import arguments
from phalanx.scripts.cluster import gpu, host_clocks, links, meeting
from phalanx.scripts.cluster.results import Gpu


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8, 16])
def test_every_node_meets_every_other_once(nodes: int) -> None:
    rounds = links.pairings(nodes)
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for one in rounds:
        busy = [node for pair in one for node in pair]
        assert len(busy) == len(set(busy)) >= nodes - 1


def test_of_many_nodes_each_meets_some() -> None:
    rounds = links.pairings(128)
    pairs = [pair for one in rounds for pair in one]
    assert len(rounds) == 15 and len(set(pairs)) == len(pairs) == 15 * 64


@pytest.mark.parametrize(
    ("mask", "faults"),
    [
        ("0x0000000000000000", []),
        ("0x0000000000000004", []),  # at its power limit, as under any load
        ("0x000000000000002C", ["hardware slowdown", "heat (software)"]),
        ("0x00000000000000C0", ["heat (hardware)", "power brake"]),
        ("[N/A]", []),
    ],
)
def test_reasons_of_the_driver(mask: str, faults: list[str]) -> None:
    assert gpu.reasons_of(mask) == faults


def test_a_gpu_is_described_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["580.95.05", "1755", "1980", "61", "[N/A]", "0x0000000000000044"]
    calls = list[str]()
    monkeypatch.setattr(gpu, "smi", lambda *_: calls.append("asked") or answers)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("waited"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b != 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    memory = SimpleNamespace(total_memory=int(79.1 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    device: Any = torch.device("cuda", 1)
    described = gpu.describe(device, lambda: calls.append("load"))
    assert calls[0] == "load" and calls[-2:] == ["asked", "waited"]
    assert described == Gpu(
        "NVIDIA H100 80GB HBM3", "580.95.05", 1755, 1980, 61, None, ["heat (hardware)"], 2, 4, 79.1
    )
    answers.clear()
    silent = Gpu("NVIDIA H100 80GB HBM3", peers=2, visible=4, memory_gib=79.1)
    assert gpu.describe(device, lambda: None) == silent


def test_a_clock_that_is_ahead_is_found() -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    leaders = {"a": 0, "b": 2, "c": 4}

    def client() -> dist.Store:
        return dist.TCPStore("localhost", server.port, wait_for_workers=False)

    ticks = threading.Lock(), [1000.0]

    def clock() -> float:
        with ticks[0]:
            ticks[1][0] += 1e-3
            return ticks[1][0]

    found: dict[int, Any] = {}
    ahead = {0: 0.0, 1: 50.0, 2: 7.5, 4: -2.0}
    threads = [
        threading.Thread(
            target=lambda rank=rank: found.update(
                {rank: host_clocks.compare(client(), rank, leaders, lambda: clock() + ahead[rank])}
            )
        )
        for rank in ahead
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found[0] is None and found[1] is None
    assert (found[2].host, found[4].host) == ("b", "c")
    for rank in (2, 4):
        assert found[rank].uncertainty < 0.1
        assert abs(found[rank].seconds - ahead[rank]) <= found[rank].uncertainty + 1e-9


def test_ranks_that_did_not_come_are_named() -> None:
    here = {0: "a", 1: "a", 6: "d", 7: "d"}
    assert meeting.absence([2, 3, 4, 5], here, local=2, timeout=30) == (
        "ranks 2-5, on nodes 1-2 of the launch counted from 0, did not come within 30 s; "
        "here are the ranks of a (0-1), d (6-7)"
    )
    many = {rank: f"n{rank}" for rank in range(12)}
    assert meeting.absence([12], many, local=1, timeout=5).endswith(", n7 (7) and 4 more hosts")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--timeout", "0"], "--timeout 0: must be greater than 0"),
        (["--network-gbs", "-1"], "--network-gbs -1: must be greater than 0"),
        (["--inject", "slow"], "--inject slow: must be like slow:rank1, with slow or hang"),
        (["--inject", "loud:rank1"], "--inject loud:rank1: must be"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        arguments(words)
    assert left.value.code == 2 and message in capsys.readouterr().err
