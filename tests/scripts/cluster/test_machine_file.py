"""The file that a check writes for `run.machine`, on made-up results."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from phalanx.configs.tables.machines import MACHINES, machine_named
from phalanx.scripts import check_cluster
from phalanx.scripts.cluster.machine_file import machine_file
from phalanx.scripts.cluster.results import Cluster, Rail
from tests.scripts.cluster.test_findings import GPU, cluster, rank

pytestmark = pytest.mark.extras  # kinds of GPUs and files of clusters are extras/clusters


def made(**changes: object) -> Cluster:
    gpu = replace(GPU, memory_gib=79.1)
    ranks = [
        rank(n, gpu=gpu, node_gbs=300.0 + n, launch_us=4.0 + n, latency_us=10.0 + n)
        for n in range(4)
    ]
    rails = [Rail(("node0", "node1"), gbs, (n, n + 2)) for n, gbs in enumerate((24.0, 21.5))]
    return replace(cluster(), ranks=ranks, rails=rails, **changes)


def test_the_file_has_what_was_measured_and_a_dry_run_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(machine_file(made()))
    m, h100 = machine_named(str(path)), MACHINES["h100"]
    measured = {
        "node_gpus": 2,
        "memory_gib": 79.1,
        "node_gbs": 300.0,
        "launch_us": 5.5,
        "network_gbs": 21.5,
        "latency_us": 13.0,
    }
    assert {name: getattr(m, name) for name in measured} == measured
    assert m.measured == h100.measured | {*measured}
    assert m.dense_tflops == h100.dense_tflops


def test_pretended_nodes_and_single_gpus_have_no_rates_of_links() -> None:
    one_host = [replace(r, host="node0") for r in made().ranks]
    text = yaml.safe_load(machine_file(replace(made(), ranks=one_host)))
    assert "network_gbs" not in text and "latency_us" not in text and text["node_gpus"] == 4
    alone = yaml.safe_load(machine_file(Cluster([rank(0, node_gbs=None)], None, [], [])))
    assert alone == {"kind": "h100", "node_gpus": 1, "measured": ["node_gpus"]}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_the_kind_is_that_of_the_gpu(name: str, kind: str) -> None:
    one = Cluster([rank(0, gpu=replace(GPU, name=name))], None, [], [])
    assert yaml.safe_load(machine_file(one))["kind"] == kind


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40S",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "NVIDIA H200 MIG 1g.18gb",
    ],
)
def test_unknown_gpus_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no kind of GPU is known that is like '{name}'"):
        machine_file(Cluster([rank(0, gpu=replace(GPU, name=name))], None, [], []))


def test_a_file_of_gpus_without_rates_is_read_too(tmp_path: Path) -> None:
    gpu = replace(GPU, name="NVIDIA A100-PCIE-40GB", memory_gib=39.4)
    ranks = [replace(r, gpu=gpu) for r in made().ranks]
    path = tmp_path / "machine.yaml"
    path.write_text(machine_file(replace(made(), ranks=ranks)))
    m = machine_named(str(path))
    assert m.only_memory and (m.node_gpus, m.memory_gib) == (2, 39.4)


def test_a_file_of_faster_links_is_read_too(tmp_path: Path) -> None:
    rails = [Rail(("node0", "node1"), 88.0, (0, 2))]
    path = tmp_path / "machine.yaml"
    path.write_text(machine_file(replace(made(), rails=rails)))
    m = machine_named(str(path))
    assert (m.network_gbs, m.network_line_gbs) == (88, 88)
    assert "network_line_gbs" not in m.measured


def test_the_option_writes_the_file_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.yaml"
    args = check_cluster.arguments(["--write", str(path)])
    check_cluster._conclude(args, made(), shown=False)
    assert not path.exists()
    check_cluster._conclude(args, made(), shown=True)
    assert path.read_text() == machine_file(made())
    nowhere = check_cluster.arguments(["--write", str(tmp_path / "no" / "machine.yaml")])
    assert check_cluster._conclude(nowhere, made(), shown=True) == 2
    assert "error: --write: cannot write" in capsys.readouterr().err
