"""First lines of output, and the record of each launch in the run folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.configs.load import load
from phalanx.moe.run import launch
from phalanx.moe.run.launch import announce, command_line, node_line
from phalanx.parallel import devices
from tests.end_to_end.project.test_secrets import KEY
from tests.support.runs import TINY, before_step, run

COMMAND = [*TINY, "data=synthetic"]


def test_a_node_tells_host_ranks_and_gpus() -> None:
    assert node_line("a", 0, 2, []) == "node a: ranks 0-1, no GPU"
    assert node_line("b", 8, 8, ["NVIDIA H200"] * 8) == "node b: ranks 8-15, 8 x NVIDIA H200"
    assert node_line("c", 3, 1, ["A", "B", "A"]) == "node c: rank 3, 2 x A, 1 x B"


def test_hosts_come_with_their_ranks_and_devices() -> None:
    places = [("a", "GPU"), ("a", "GPU"), ("b", "GPU"), ("b", "other"), ("a", "GPU")]
    assert launch._hosts(places) == [
        {"host": "a", "ranks": "0-1, 4", "devices": {"GPU": 3}},
        {"host": "b", "ranks": "2-3", "devices": {"GPU": 1, "other": 1}},
    ]


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_one_line_for_the_run_and_one_a_node(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank % 4, "LOCAL_WORLD_SIZE": 4}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launch.socket, "gethostname", lambda: "host")
    monkeypatch.setattr(devices, "names", lambda: ["GPU"] * 4)
    announce(load(["run.name=x"]), 8)
    run_line = "Phalanx: run runs/x on 8 ranks; importing torch and Megatron-Core"
    said = {0: [run_line, "node host: ranks 0-3, 4 x GPU"], 4: ["node host: ranks 4-7, 4 x GPU"]}
    assert capsys.readouterr().out.splitlines() == said.get(rank, [])


def test_gpus_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.names() == []


@pytest.mark.gpu
def test_gpus_are_those_that_torch_sees() -> None:
    import torch

    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert devices.names() == found


def test_the_command_can_be_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    line = command_line(["data.split='98,2'", f"run.name={KEY}"])
    assert line.endswith("""train.py 'data.split='"'"'98,2'"'"'' run.name=***""")


@contextmanager
def keyed(rank: int, *, at: int, act: Any) -> Iterator[None]:
    os.environ["WANDB_API_KEY"] = KEY
    try:
        with before_step(at, act):
            yield
    finally:
        del os.environ["WANDB_API_KEY"]


def looked(folder: Path) -> None:
    """During the first step all is there already."""
    assert {"config.yaml", "console.log", "launches"} <= {p.name for p in folder.iterdir()}


@pytest.mark.dist
def test_a_run_keeps_what_it_was_and_each_launch_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*COMMAND, f"run.dir={tmp_path}", f"run.project={KEY}"]
    runs = []
    for steps in (1, 2):
        change = partial(keyed, at=1, act=partial(looked, folder))
        ranks = run(2, [*command, f"run.steps={steps}"], change)
        assert [rank.code for rank in ranks] == [0, 0], ranks
        runs.append(ranks[0])

    first, second = (yaml.safe_load(p.read_text()) for p in sorted((folder / "launches").iterdir()))
    assert (first["config"]["run"]["steps"], second["config"]["run"]["steps"]) == (1, 2)
    assert "run.steps=1" in first["command"] and "run.steps=2" in second["command"]
    assert first["ranks"] == 2 and first["hosts"][0]["ranks"] == "0-1"
    assert first["hosts"][0]["devices"] == {"CPU process": 2}
    assert {"python", "torch", "megatron-core", "nvidia-cutlass-dsl"} <= set(first["versions"])
    assert set(first["code"]) == {"commit", "changed"}
    newest = (folder / "config.yaml").read_text()
    assert yaml.safe_load(newest) == second["config"] and newest.startswith("# 20")
    assert second["config"]["run"]["project"] == "***"

    log = (folder / "console.log").read_text()
    titles = [f"==== {about['time']}  {about['command']}" for about in (first, second)]
    said = [text for main in runs for text in (main.out, main.err)]
    assert sorted(log.splitlines()) == sorted(titles + "".join(said).splitlines())
    assert log.startswith(f"{titles[0]}\n{runs[0].out}{titles[1]}\nPhalanx: run ")
    assert log.count("\n 1/1 ") == log.count("\n 2/2 ") == 1 and "resumed from step 1" in log
    assert not any(KEY.encode() in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


@pytest.mark.dist
def test_a_bench_keeps_it_as_well(tmp_path: Path) -> None:
    bench = [word for word in COMMAND if word != "run.name=run"]
    ranks = run(1, [*bench, "run=bench", "run.steps=1", f"run.dir={tmp_path}"])
    assert ranks[0].code == 0
    found = sorted(path.name for path in (tmp_path / "bench_tiny").iterdir())
    assert found == ["checkpoints", "config.yaml", "console.log", "launches", "metrics.jsonl"]


def test_two_launches_within_a_second_have_two_files(tmp_path: Path) -> None:
    names = ["a.yaml", "a_2.yaml", "a_3.yaml"]
    for name in names:
        path = launch._unused(tmp_path, "a")
        assert path.name == name
        path.touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == names
