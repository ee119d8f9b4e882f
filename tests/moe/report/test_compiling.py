"""Lines about kernels that are compiled or loaded: at the start, on the way, at the end."""

import time
from pathlib import Path

import pytest

from phalanx.kernels.cache import Cache, name_of
from phalanx.moe.report import compiling
from phalanx.moe.report.compiling import report_compilation


def names(count: int) -> list[str]:
    return [name_of(f"Kernel{number}", "fact") for number in range(count)]


def test_progress_of_compilations_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while one kernel is compiled for longer than the time between two lines."""
    monkeypatch.setattr(compiling, "_EVERY", 0.05)
    monkeypatch.setenv("PHALANX_KERNEL_CACHE", str(tmp_path))
    cache, said = Cache(tmp_path), list[str]()
    cache.fetch(names(1)[0], lambda: b"there already")

    def compiled() -> bytes:
        before, end = len(said), time.monotonic() + 10
        while len(said) == before and time.monotonic() < end:
            time.sleep(0.01)
        return b"code"

    with report_compilation(said.append):
        assert said == []
        for name in names(3):
            cache.fetch(name, compiled)
    cache.fetch(names(4)[3], lambda: b"nobody listens any more")
    where = f"kernels: loading from {tmp_path}, compiling those that are not cached"
    told = [line.partition(" after ")[0].partition(" in ")[0] for line in said]
    assert told[0] == where and told[-1] == "kernels: ready, 2 compiled, 1 loaded"
    first, second = (told.index(f"kernels: {n} compiled, 1 loaded") for n in (0, 1))
    assert said[first].endswith("; now Kernel1") and said[second].endswith("; now Kernel2")


def test_a_failure_ends_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_EVERY", 0.01)
    said = list[str]()
    with pytest.raises(KeyError), report_compilation(said.append):
        Cache(tmp_path).fetch(names(1)[0], lambda: {}["no such kernel"])
    before = len(said)
    time.sleep(0.05)
    assert len(said) == before and "ready" not in said[-1]


def test_lines_come_now_and_then(tmp_path: Path) -> None:
    said = list[str]()
    with report_compilation(said.append):
        for name in names(30):
            Cache(tmp_path).fetch(name, lambda: b"code")
    assert len(said) == 2 and "30 compiled, 0 loaded in 0." in said[1]


def test_without_kernels_there_is_nothing_to_tell() -> None:
    said = list[str]()
    with report_compilation(said.append):
        pass
    assert said == []
