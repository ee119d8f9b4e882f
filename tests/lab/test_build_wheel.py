"""`scripts/lab/release/build_wheel.py`: what a release is, with one library for all its kernels."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from phalanx.scripts.lab.release import build_wheel
from tests import installed_alone
from tests.support.pages import ROOT


def test_a_wheel_has_compiled_kernels_and_the_archive_has_sources(tmp_path: Path) -> None:
    libraries, out = tmp_path / "libraries", tmp_path / "out"
    libraries.mkdir()
    (libraries / "Kernel-0.so").write_bytes(b"\x7fELF")
    wheel = build_wheel.pack(libraries, out)
    assert "-py3-none-manylinux_2_28_" in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        names = {*packed.namelist()}
    assert "phalanx/kernels/compiled/Kernel-0.so" in names and "phalanx/train.py" in names
    assert not any(name.startswith("phalanx/scripts/lab/") for name in names)
    (source,) = out.glob("*.tar.gz")
    with tarfile.open(source) as packed:
        members = {name.partition("/")[2] for name in packed.getnames()}
    assert {"pyproject.toml", "phalanx/kernels/api.py"} <= members
    assert not any(name.endswith(".so") for name in members)


def test_a_plain_wheel_is_the_package_alone_and_computes(tmp_path: Path) -> None:
    assert build_wheel.main(["--kernels", "none", "--out", str(tmp_path)]) == 0
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "site")
    assert not [n for n in names if n.endswith((".md", ".so", ".ipynb")) or "/compiled/" in n]
    assert not [n for n in names if n.startswith(("phalanx/tests", "tests", "phalanx/scripts/lab"))]
    docs = {name for name in names if name.startswith("phalanx/docs/")}
    assert {Path(name).suffix for name in docs} == {".yaml"}  # records that runs read
    assert {n.partition("/")[0] for n in names} == {
        "phalanx",
        wheel.name.partition("-py3")[0] + ".dist-info",
    }
    installed_alone.link_into(torch := tmp_path / "torch", "torch")
    code = f"""
import sys
sys.path += [{str(tmp_path / "site")!r}, {str(torch)!r}]
import phalanx
assert "torch" not in sys.modules
from phalanx import grouped_experts
import torch
prob, idx = torch.rand(4, 2).topk(1)
weights = torch.randn(2, 32, 8), torch.randn(2, 8, 16)
assert grouped_experts(torch.randn(4, 8), idx, prob, *weights).shape == (4, 8)
print(phalanx.__file__)
"""
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path.anchor, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "site/phalanx/__init__.py")


def test_the_list_counts_kernels_and_compiles_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.jit.shipped import COMPILED

    place = ["--cache", str(tmp_path), "--jobs", "2"]
    assert build_wheel.main(["--kernels", "common", "--list", *place]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{len(lines)} kernels, ") and last.endswith(str(tmp_path))
    assert 40 < len(lines) < 80 and not [*tmp_path.iterdir()]
    common = build_wheel.selected("common")
    assert len(common) == len(lines) and {*common} < {*build_wheel.selected("all")}
    assert {*common} < {*COMPILED}
    with_bias = {
        str(config) for (kernel, config), models in common.items() if "bias=True" in str(config)
    }
    assert with_bias and all("quick_geglu" in c or "Linear(bias=True" in c for c in with_bias)
    assert common[next(k for k in common if "slots=4" in str(k[1]))] == [
        "gpt_oss_120b",
        "gpt_oss_20b",
    ]
    pages = "".join((ROOT / name).read_text() for name in ("docs/use_it.md", "docs/package.md"))
    assert f"{len(build_wheel.selected('all'))} compiled kernels" in pages
    assert f"{len(common)} kernels" in pages


def test_no_job_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_wheel.main(["--list", "--kernels", "none", "--jobs", "0"])
    assert "--jobs 0: must be at least 1" in capsys.readouterr().err
