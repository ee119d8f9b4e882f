"""Hosts whose settings, code or packages differ do not train together; one line says why."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from phalanx.configs.knobs import knobs
from phalanx.configs.load import load
from phalanx.moe.run import shared
from phalanx.parallel.fault.same_settings import Difference
from tests.support.distributed import run_distributed
from tests.support.launch import free_port
from tests.support.runs import TINY, Rank, _run, exact, records, run
from tests.support.torchrun import ROOT

COMMAND = [*TINY, "data=synthetic", "run.steps=2"]

DIFFERENT = {
    "optim.lr": ("0.01", "0.02"),
    "run.save_interval": ("0", "1"),
    "model.moe.top_k": ("2", "1"),
    "precision.recipe": ("bf16", "fp32"),
}


def on_hosts(overrides: Sequence[Sequence[str]]) -> list[Rank]:
    """A rank of each host, with overrides of its own."""
    return run_distributed(_host, len(overrides), [list(words) for words in overrides])


def _host(overrides: list[list[str]]) -> Rank:
    return _run(overrides[int(os.environ["RANK"])], None)


@pytest.mark.dist
@pytest.mark.parametrize("knob", DIFFERENT)
def test_other_settings_on_one_host_are_refused_by_all(knob: str, tmp_path: Path) -> None:
    here, there = DIFFERENT[knob]
    both = [*COMMAND, f"run.dir={tmp_path}"]
    ranks = on_hosts([[*both, f"{knob}={here}"], [*both, f"{knob}={there}"]])
    assert [rank.code for rank in ranks] == [2, 2] and ranks[1].err == ""
    line = rf"error: hosts differ: {knob} is {here} on \S+ \(rank 0\) and {there} on \S+ \(rank 1\)"
    assert re.fullmatch(f"{line}: start every host with the same overrides\n", ranks[0].err)
    assert not (tmp_path / "run/config.yaml").exists()


@pytest.mark.dist
def test_folders_of_a_host_may_differ(tmp_path: Path) -> None:
    paths = [[f"run.dir={tmp_path / n}", f"data.cache={tmp_path / n / 'cache'}"] for n in "ab"]
    ranks = on_hosts([[*COMMAND, *paths[0]], [*COMMAND, *paths[1], "run.device=auto"]])
    assert [(rank.code, rank.err) for rank in ranks] == [(0, "")] * 2


@contextmanager
def another(rank: int, *, name: str, only: int) -> Iterator[None]:
    """Rank `only` has another `name` of `moe.run.shared`."""
    values = {"sources": "f00d" * 16, "packages": {"triton": "0.1"}}
    different = mock.patch.object(shared, name, return_value=values[name])
    unchanged = mock.patch.object(shared, "packages", return_value={"triton": "3.6"})
    with unchanged, different if rank == only else mock.MagicMock():
        yield


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sources", r"code is .*sources f00df00d on \S+ \(rank 1\): bring every host to the same"),
        ("packages", r"package triton is 3.6 on .* and 0.1 on .*: install the same version"),
    ],
)
def test_other_code_or_packages_are_refused(name: str, said: str, tmp_path: Path) -> None:
    ranks = run(2, [*COMMAND, f"run.dir={tmp_path}"], partial(another, name=name, only=1))
    assert [rank.code for rank in ranks] == [2, 2]
    assert re.search(said, ranks[0].err) and ranks[0].err.count("\n") == 1


def test_every_knob_is_shared_but_those_of_a_host() -> None:
    values = shared.shared_values(load([]))
    assert set(shared.HOST_LOCAL) < set(knobs())
    assert set(knobs()) - set(values) == set(shared.HOST_LOCAL)
    assert {"device", "code", "package torch", "package megatron-core"} < set(values)
    assert values["code"] == shared.sources()


def test_changed_sources_have_another_digest(tmp_path: Path) -> None:
    """And what is no source does not matter."""
    for part in ("configs", "extras", "kernels", "moe", "parallel"):
        (tmp_path / part).mkdir()
    code = tmp_path / "moe" / "layer.py"
    code.write_text("x = 1\n")
    with mock.patch.object(shared.phalanx, "__file__", str(tmp_path / "__init__.py")):
        first = shared.sources()
        (tmp_path / "moe" / "layer.pyc").write_text("compiled")
        assert shared.sources() == first
        code.write_text("x = 2\n")
        assert shared.sources() != first


def test_a_line_has_the_first_difference_and_the_names_of_some() -> None:
    found = [Difference(name, "1 on a (rank 0) and 2 on b (rank 1)") for name in "abcdefg"]
    assert shared.refusal(found[:1]).startswith("hosts differ: a is 1 on a (rank 0) and 2 on b (r")
    assert "; so does b: start" in shared.refusal(found[:2])
    assert "; so do b, c, d, e, 2 more: start" in shared.refusal(found)


@pytest.mark.slow
@pytest.mark.dist
def test_two_launchers(tmp_path: Path) -> None:
    """Launches of one job on this machine: rejected with other settings, one run with the same."""
    words = [*COMMAND, f"run.dir={tmp_path}", "parallel.timeout=60"]
    for different, codes in (("optim.lr=2e-2", [1, 1]), ("optim.lr=1e-2", [0, 0])):
        port = free_port()
        launchers = [
            subprocess.Popen(
                [
                    *[sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"],
                    *["--node-rank", str(node), "--nproc-per-node", "1"],
                    *["--master-addr", "127.0.0.1", "--master-port", str(port)],
                    *["train.py", *words, *([different] if node else [])],
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in (0, 1)
        ]
        try:
            said = [launcher.communicate(timeout=120)[0] for launcher in launchers]
        finally:
            for launcher in launchers:
                launcher.kill()
        assert [launcher.returncode for launcher in launchers] == codes, said
        assert ("hosts differ: optim.lr is 0.01 on" in said[0]) == (codes == [1, 1])
    assert len(exact(records(tmp_path / "run"))) == 2
