"""Judgement of a cluster: what is named, and what is not, on made-up results."""

import json
from dataclasses import replace
from typing import Any

import pytest

from phalanx.configs.tables.machines import MACHINES
from phalanx.scripts.cluster import table
from phalanx.scripts.cluster.findings import Expected, expected_of, findings
from phalanx.scripts.cluster.results import Cluster, Gpu, Rail, Rank, Skew

H100 = MACHINES["h100"]
GPU = Gpu("NVIDIA H100 80GB HBM3", "580.1", 1755, 1980, 55, 690, [], peers=1, visible=2)
VERSIONS = {"torch": "2.11.0", "NCCL": "2.28.9"}


def rank(number: int, **changes: Any) -> Rank:
    """One of two ranks on each of two hosts, that reaches what is expected."""
    host = f"node{number // 2}"
    fine = Rank(number, host, host, GPU, VERSIONS, H100.dense_tflops, H100.node_gbs, "yes")
    return replace(fine, **changes)


def cluster(**changes: Any) -> Cluster:
    fine = Cluster(
        [rank(number) for number in range(4)],
        2 * H100.network_gbs,
        [Rail(("node0", "node1"), H100.network_gbs, (0, 2))],
        [Skew("node1", 0.01, 0.001)],
    )
    return replace(fine, **changes)


def with_rank(number: int, **changes: Any) -> Cluster:
    ranks = cluster().ranks
    ranks[number] = replace(ranks[number], **changes)
    return cluster(ranks=ranks)


def found(results: Cluster, network_gbs: float | None = None) -> list[str]:
    return findings(results, expected_of(results, network_gbs))


def test_what_reaches_the_table_of_machines_is_fine() -> None:
    assert found(cluster()) == []
    assert expected_of(cluster()) == Expected(
        "H100 SXM", H100.dense_tflops, H100.node_gbs, H100.network_gbs, 2 * H100.network_gbs
    )


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"])
def test_other_boards_are_not_expected_to_be_as_fast_as_the_modules(name: str) -> None:
    ranks = [rank(n, gpu=replace(GPU, name=name), tflops=400.0, node_gbs=25.0) for n in range(4)]
    assert found(cluster(ranks=ranks)) == []


@pytest.mark.parametrize(
    ("results", "line"),
    [
        (
            with_rank(3, tflops=500.0),
            "rank 3 (node1) is slow: 500 TFLOP/s, where the median is 620",
        ),
        (with_rank(1, node_gbs=200.0), "rank 1 (node0): 200 GB/s inside its node, expected 335"),
        (
            with_rank(2, symmetric_memory="what local rank 1 wrote did not arrive"),
            "rank 2 (node1): no symmetric memory: what local rank 1 wrote did not arrive",
        ),
        (
            with_rank(0, gpu=replace(GPU, peers=0)),
            "rank 0 (node0): reaches 0 of 1 GPUs of its host",
        ),
        (
            with_rank(1, gpu=replace(GPU, slowed_by=["heat (hardware)"])),
            "rank 1 (node0): clocks are held back by heat (hardware)",
        ),
        (
            cluster(rails=[Rail(("node0", "node1"), 24.6, (1, 3))]),
            "node0 and node1: 24.6 GB/s between ranks 1 and 3, expected 40",
        ),
        (cluster(all_reduce_gbs=20.0), "all-reduce of all ranks: 20 GB/s, expected 80"),
        (
            cluster(skews=[Skew("node1", -3.21, 0.001)]),
            "node1: its clock is 3.2 s behind that of node0",
        ),
    ],
)
def test_what_is_below_is_named(results: Cluster, line: str) -> None:
    assert found(results) == [line]
    shown = table.text(results, expected_of(results), [line])
    assert shown.endswith(f"below expectation (1):\n  {line}")


def test_hosts_with_other_drivers_are_named() -> None:
    (line,) = found(with_rank(3, gpu=replace(GPU, driver="575.2")))
    assert line == (
        "hosts differ: driver is 580.1 on node0, node1 (ranks 0-2) and 575.2 on node1 (rank 3)"
    )


def test_a_driver_that_does_not_answer_is_named() -> None:
    silent = with_rank(3, gpu=Gpu(GPU.name, peers=1, visible=2))
    assert "rank 3 (node1): nvidia-smi does not answer" in found(silent)


def test_gpus_that_are_all_slow_are_one_finding() -> None:
    ranks = [rank(number, tflops=400.0) for number in range(4)]
    (line,) = found(cluster(ranks=ranks))
    assert line.startswith("all GPUs are slow: matrix products reach 400 TFLOP/s, expected 620")


def test_a_network_of_another_rate_is_expected_when_it_is_given() -> None:
    slower = cluster(rails=[Rail(("node0", "node1"), 11.0, (0, 2))], all_reduce_gbs=22.0)
    assert len(found(slower)) == 2
    assert found(slower, network_gbs=12.0) == []


def test_unknown_gpus_are_compared_with_each_other() -> None:
    gpu = replace(GPU, name="NVIDIA B300")
    ranks = [rank(number, gpu=gpu, node_gbs=800.0) for number in range(4)]
    rails = [Rail((f"node{a}", f"node{b}"), 90.0, (0, 2)) for a, b in ((0, 1), (0, 2), (1, 2))]
    assert found(cluster(ranks=ranks, rails=rails)) == []
    rails[1] = replace(rails[1], gbs=45.0)
    assert found(cluster(ranks=ranks, rails=rails)) == [
        "node0 and node2: 45 GB/s between ranks 0 and 2, expected 90"
    ]


def test_cpus_have_no_expectation_but_each_other() -> None:
    ranks = [
        Rank(number, "a", str(number // 2), Gpu("CPU"), VERSIONS, speed, 0.5 + number)
        for number, speed in enumerate((0.1, 0.05, 0.11, 0.09))
    ]
    rails = [Rail(("0", "1"), 0.01, (0, 2)), Rail(("0", "2"), 1.0, (0, 4))]
    results = Cluster(ranks, 0.2, rails, [])
    assert found(results) == []
    ranks[1] = replace(ranks[1], tflops=0.01)
    (line,) = found(results)
    assert line == "rank 1 (a) is slow: 0.01 TFLOP/s, where the median is 0.1"
    text = table.text(results, Expected(), [])
    assert "pretended nodes of one host: 0.01 to 1 GB/s; lowest 0 with 1" in text
    assert "driver" not in text and "MHz" not in text


def test_pretended_nodes_of_one_host_have_no_network() -> None:
    ranks = [rank(number, host="a", node=str(number // 2)) for number in range(4)]
    results = cluster(ranks=ranks, all_reduce_gbs=H100.node_gbs)
    assert expected_of(results).network_gbs is None
    assert expected_of(results).all_reduce_gbs == H100.node_gbs
    assert found(results) == []


def test_json_has_everything_and_the_table_the_slowest_of_many() -> None:
    ranks = [rank(number, tflops=H100.dense_tflops - number % 2) for number in range(66)]
    results = cluster(ranks=ranks)
    values = json.loads(json.dumps(table.values(results, expected_of(results), [])))
    assert values["exit_code"] == 0 and len(values["ranks"]) == 66
    assert values["ranks"][65]["gpu"]["driver"] == "580.1"
    assert table.values(results, Expected(), ["a line"])["exit_code"] == 1
    lines = table.text(results, expected_of(results), []).splitlines()
    shown = [int(line.split()[0]) for line in lines[1 : lines.index("")] if line[0] == " "]
    assert shown == list(range(1, 66, 2))
    assert "(of 66 ranks the slowest of each node; --json has all)" in lines
