"""build_kernels: a run only loads what it built; it skips, lists, selects, and names failures."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from phalanx.kernels.cache import Cache, statistics
from phalanx.kernels.core_attention import fa4_shipped
from phalanx.kernels.rms_norm import quack_library
from phalanx.kernels.sm90.jit import launch
from phalanx.kernels.sm90.jit.objects import symbols
from phalanx.kernels.sm90.jit.shipped import SHIPPED
from phalanx.scripts import build_kernels

ROOT = Path(build_kernels.__file__).resolve().parent.parent
LABELS = [
    *(f"{kernel.__name__} {config}" for kernel, config in SHIPPED),
    *(f"flash-attn-4 {layer}" for layer in fa4_shipped.SHIPPED),
    *(f"QuACK {rows}" for rows in quack_library.SHIPPED),
]


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/build_kernels.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_run_compiles_nothing_that_was_built(tmp_path, capsys):
    build = ("--dir", str(tmp_path), "--only", LABELS[0], "--jobs", "1")
    first = script(*build)
    assert first.returncode == 0, first.stderr
    one, summary = first.stdout.splitlines()
    assert one.startswith(f"[1/1] {LABELS[0]}  ") and one.endswith(" s")
    assert summary.startswith("1 kernel built, 0 were cached, 0 failed")

    assert build_kernels.main(build) == 0
    assert capsys.readouterr().out.startswith("0 kernels built, 1 were cached, 0 failed")

    assert build_kernels.main(["--list", "--dir", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == [f"cached  {LABELS[0]}", *(f"missing {label}" for label in LABELS[1:])]

    kernel, config = SHIPPED[0]
    before = vars(statistics()).copy()
    data = launch.build(kernel, config, Cache(tmp_path))
    launch.Program(symbols(data, launch.PREFIX), launch.arguments_of(kernel).kinds)
    counts = {name: count - before[name] for name, count in vars(statistics()).items()}
    assert (counts["compiled"], counts["loaded"]) == (0, 1)


def test_each_failure_has_a_line_and_the_code_is_1(tmp_path, monkeypatch, capsys):
    lost = str(tmp_path / "lost.so")
    monkeypatch.setenv("CUTE_DSL_LIBS", lost)
    assert build_kernels.main(["--dir", str(tmp_path), "--only", LABELS[0]]) == 1
    one, summary = capsys.readouterr().out.splitlines()
    assert one.startswith(f"[1/1] {LABELS[0]}  FAILED  ") and lost in one
    assert summary.startswith("0 kernels built, 0 were cached, 1 failed")


def test_what_cannot_be_done_is_said_in_a_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    for arguments, output in (
        (["--dir", str(tmp_path / "file" / "folder")], "cannot write to"),
        (["--only", "no such kernel"], "no kernel contains 'no such kernel'"),
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
    ):
        try:
            assert build_kernels.main(arguments) != 0
        except SystemExit as end:
            assert end.code != 0
        assert output in capsys.readouterr().err.splitlines()[-1]


def test_errors_of_the_compiler_take_one_line():
    error = ValueError("\n\x1b[91merror\x1b[0m: too\n   many\n\n registers\n")
    assert build_kernels.reason(error) == "ValueError: error: too many registers"


def test_without_the_compiler_there_is_one_line(monkeypatch, capsys):
    def lacking():
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    monkeypatch.setattr(build_kernels, "targets", lacking)
    assert build_kernels.main(["--list"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no package cutlass, which compiles kernels: pip install '")
    assert "'nvidia-cutlass-dsl[cu13]==4.8.1'" in line
