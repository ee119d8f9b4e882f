"""Lines about kernels that are compiled or loaded: at the start, on the way, at the end."""

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
    monkeypatch.setattr(compiling, "_EVERY", 0.0)
    monkeypatch.setenv("PHALANX_KERNEL_CACHE", str(tmp_path))
    cache, said = Cache(tmp_path), list[str]()
    cache.fetch(names(1)[0], lambda: b"there already")
    with report_compilation(said.append):
        assert said == []
        for name in names(3):
            cache.fetch(name, lambda: b"code")
    cache.fetch(names(4)[3], lambda: b"nobody listens any more")
    where = f"kernels: loading from {tmp_path}, compiling those that are not cached"
    assert [line.partition(" after ")[0].partition(" in ")[0] for line in said] == [
        where,
        "kernels: 0 compiled, 1 loaded",
        "kernels: 1 compiled, 1 loaded",
        "kernels: ready, 2 compiled, 1 loaded",
    ]
    assert said[1].endswith("; next Kernel1") and said[2].endswith("; next Kernel2")


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
