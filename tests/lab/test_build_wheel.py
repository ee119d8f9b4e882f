"""`scripts/lab/release/build_wheel.py`: what a release is, with one library for all its kernels."""

import tarfile
import zipfile
from pathlib import Path

from phalanx.scripts.lab.release import build_wheel


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
