"""Machines by name and by file: what `run.machine` may be, and what it says when it may not."""

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from phalanx.configs.arithmetic.accounting import bf16_peak, fp8_peak
from phalanx.configs.load import load
from phalanx.configs.tables.machines import MACHINES, Machine, machine_named, machine_of
from phalanx.configs.validate import ConfigError, validate
from phalanx.extras.clusters.described import GPUS, KEPT, RATES
from phalanx.extras.clusters.kinds import KINDS


def file_of(folder: Path, text: str) -> str:
    path = folder / "machine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_other_gpus_are_slower_than_their_data_sheets(kind: str) -> None:
    m = machine_named(kind)
    assert m.measured == frozenset()
    peak = bf16_peak(m.name)
    assert peak is not None
    if m.only_memory:
        assert m.memory_gib < 80
        return
    assert max(m.dense_tflops, m.head_tflops, m.expert_tflops, m.attention_tflops) < peak
    assert max(m.dense_fp8_tflops, m.expert_fp8_tflops) < (fp8_peak(m.name) or 0)
    assert m.network_gbs < m.network_line_gbs and m.node_gbs < m.node_line_gbs
    assert m.network_gbs < m.node_gbs < m.memory_gbs


def test_an_h800_is_an_h100_with_slower_links_inside_a_node() -> None:
    h800, h100 = KINDS["h800"], MACHINES["h100"]
    links = {"node_gbs": h800.node_gbs, "node_line_gbs": h800.node_line_gbs}
    assert h800 == replace(h100, name=h800.name, measured=frozenset(), **links)
    assert 150 <= h800.node_gbs <= 160


def test_a_run_takes_measured_rates_of_the_gpu_that_it_has_alone() -> None:
    assert machine_of("NVIDIA H200", "b200") == "h200"
    assert machine_of("NVIDIA H20", "h100") == "h100"  # as `run.machine` says


def test_a_file_changes_a_kind(tmp_path: Path) -> None:
    text = "kind: h100\nnetwork_gbs: 21.5\nnode_gpus: 4\nmemory_gbs: 2000\n"
    text += "measured: [network_gbs]\n"
    m = machine_named(file_of(tmp_path, text))
    h100 = MACHINES["h100"]
    changes = {"network_gbs": 21.5, "node_gpus": 4, "memory_gbs": 2000}
    measured = h100.measured | {"network_gbs"}
    assert m == replace(h100, name="H100 SXM of machine.yaml", measured=measured, **changes)
    assert "node_gbs" in m.measured and "memory_gbs" not in m.measured


def test_what_a_file_changes_is_an_assumption_unless_it_says_otherwise(tmp_path: Path) -> None:
    m = machine_named(file_of(tmp_path, "kind: h200\nnode_gbs: 100\n"))
    assert "node_gbs" not in m.measured and "dense_tflops" in m.measured


def test_numbers_may_have_an_exponent_and_kinds_capitals(tmp_path: Path) -> None:
    """As `check_cluster.py` writes large ones."""
    m = machine_named(file_of(tmp_path, f"kind: H200\nlatency_us: {20000.0:.4g}\n"))
    assert m.latency_us == 20000 and m.memory_gib == MACHINES["h200"].memory_gib


def test_faster_links_have_a_faster_line(tmp_path: Path) -> None:
    text = "kind: h100\nnetwork_gbs: 80\nnetwork_line_gbs: 100\nmemory_gib: 93.1\n"
    m = machine_named(file_of(tmp_path, text))
    assert (m.network_gbs, m.network_line_gbs, m.memory_gib) == (80, 100, 93.1)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    first = machine_named(file_of(tmp_path, "kind: h200\nnetwork_gbs: 10\n"))
    path = Path(file_of(tmp_path, "kind: h200\nnetwork_gbs: 20\n"))
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    assert (first.network_gbs, machine_named(str(path)).network_gbs) == (10, 20)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must have lines like `kind: h100`"),
        ("network_gbs: 5", "must have a line `kind:` with one of h200, h100"),
        ("kind: h300", "must have a line `kind:` with one of h200, h100, h800, h20, b200, gb200, "),
        ("kind: GH200", "a100, not gh200: correct"),
        ("kind: h100\nmemory_gib: 81559", "has memory_gib: 81559, more than 3 times the 79.1 of"),
        ("kind: h100\ndense_tflops: 5e3", "has dense_tflops: 5000, more than 3 times the 620"),
        ("kind: h100\nnetwork_gbs: 400", "has network_gbs: 400 above network_line_gbs: 50, as if"),
        ("kind: h100\nnode_gbs: 900", "has node_gbs: 900 above node_line_gbs: 450, as if in anot"),
        ("kind: [h100", "is no YAML, line 1"),
        ("kind: a100\nnode_gpus: 4\nnetwork_gbs: 20", "has network_gbs, but of kind a100 the mem"),
        ("kind: h100\nspeed: 5", "has speed, none of kind, measured, memory_gib"),
        (
            "kind: h100\nnetwrk_gbs: 5",
            "has netwrk_gbs, which is no field and near network_gbs: correct",
        ),
        ("kind: h100\nname: mine", "has name, none of"),
        ("kind: h100\nnetwork_gbs: fast", "has network_gbs: 'fast', which must be a number"),
        ("kind: h100\nnetwork_gbs: 0", "has network_gbs: 0, which must be above 0"),
        ("kind: h100\nnetwork_gbs: .nan", "has network_gbs: nan, which must be above 0"),
        ("kind: h100\nlatency_us: -1", "has latency_us: -1, which must be at least 0"),
        ("kind: h100\nnode_gpus: 4.5", "has node_gpus: 4.5, which must be a whole number"),
        ("kind: h100\nmeasured: [speed]", "has measured: 'speed', which must be a list of fields"),
        ("kind: h100\nmeasured: node_gbs", "has measured: 'node_gbs', which must be a list"),
        ("kind: h100\nmeasured: [[node_gbs]]", "has measured: ['node_gbs'], which must be a list"),
    ],
)
def test_a_file_that_says_something_impossible_is_refused(
    tmp_path: Path, text: str, why: str
) -> None:
    name = file_of(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        validate(load([f"run.machine={name}"]), 1)
    message = str(raised.value)
    assert why in message and f"run.machine={name}" in message and "set run.machine=h200" in message


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("h300", "is none of h200, h100, h800, h20, b200, gb200, a100, and no YAML file"),
        ("missing.yaml", "cannot be read: No such file or directory"),
    ],
)
def test_an_unknown_machine_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validate(load([f"run.machine={name}"]), 1)


def test_every_number_of_a_machine_can_be_set() -> None:
    assert {*RATES, *KEPT} == {f.name for f in fields(Machine)}
    assert all(isinstance(getattr(m, name), int | float) for m in GPUS.values() for name in RATES)
