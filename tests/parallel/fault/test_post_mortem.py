"""Files that a rank leaves behind where its device no longer answers."""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from phalanx.parallel.fault import post_mortem


@pytest.fixture
def _on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    entry = {"profiling_name": "nccl:all_reduce", "state": "scheduled"}
    dump = json.dumps({"entries": [entry]}).encode()
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: dump, raising=False)


@pytest.mark.usefixtures("_on_nccl")
def test_collectives_of_nccl_are_left_behind(tmp_path: Path) -> None:
    post_mortem.write(tmp_path, 3, "rank 1 died", ValueError("what was handled"))
    record = json.loads((tmp_path / "rank_3.collectives.json").read_bytes())
    assert [entry["profiling_name"] for entry in record["entries"]] == ["nccl:all_reduce"]


def test_a_traceback_is_left_behind_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "/slashed+key")

    def fails() -> None:
        raise ConnectionError("no answer from s3://me:hunter2@bucket with /slashed+key")

    with pytest.raises(ConnectionError) as info:
        fails()
    post_mortem.write(tmp_path, 3, "rank 1 hangs; it has /slashed+key", info.value)
    text = (tmp_path / "rank_3.txt").read_text()
    assert text.startswith("rank 1 hangs; it has ***\n") and "in fails\n" in text
    assert "ConnectionError: no answer from s3://***@bucket with ***\n" in text
    assert "slashed" not in text.replace('with /slashed+key")', "")  # a line of code is no value


@pytest.mark.parametrize("umask", [0o002, 0o022])
def test_only_the_user_of_the_run_may_read_them(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "failures/now"
    before = os.umask(umask)
    try:
        post_mortem.write(folder, 3, "rank 1 died", None)
        (folder / "rank_3.txt").chmod(0o644)  # as an earlier version would have left it
        post_mortem.write(folder, 3, "rank 1 died", None)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"now": 0o700, "rank_3.txt": 0o600, "rank_3.collectives.json": 0o600}


def test_a_record_that_cannot_be_had_costs_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bytes:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", broken)
    post_mortem.write(tmp_path / "failures", 3, "rank 1 died", ValueError("what was handled"))
    text = (tmp_path / "failures/rank_3.txt").read_text()
    assert text.startswith("rank 1 died\n") and "what was handled" in text
    assert "test_post_mortem.py" in text  # the stack
    record = json.loads((tmp_path / "failures/rank_3.collectives.json").read_bytes())
    assert record == {"entries": [], "error": "CUDA error: unspecified launch failure"}


def test_pages_of_torch_go_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def pages() -> bytes:
        os.write(2, b"Failed to update state for entry 117")
        return b"{}"

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", pages)
    post_mortem.write(tmp_path, 3, "rank 1 hangs", None)
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"
    text = (tmp_path / "rank_3.txt").read_text()
    assert text.startswith("rank 1 hangs\n") and text.endswith("for entry 117")


@pytest.mark.usefixtures("_on_nccl")
def test_a_broken_device_costs_the_record_of_collectives_and_no_more(tmp_path: Path) -> None:
    error = "CUDA error: unspecified launch failure"
    post_mortem.write(tmp_path / "failures", 3, "rank 1 died", RuntimeError(error))
    text = (tmp_path / "failures/rank_3.txt").read_text()
    assert text.startswith("rank 1 died\n") and error in text
    assert "test_post_mortem.py" in text  # the stack
    record = json.loads((tmp_path / "failures/rank_3.collectives.json").read_bytes())
    assert record == {"entries": [], "error": "not known after a CUDA error"}
