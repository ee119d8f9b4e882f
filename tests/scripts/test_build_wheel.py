"""The wheel contains compiled kernels and needs torch alone; the other archive has sources."""

import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

from phalanx.scripts.release import build_wheel


def test_what_is_packed(tmp_path: Path) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "Kernel-0.so").write_bytes(b"\x7fELF")
    wheel = build_wheel.pack(libraries, tmp_path / "out")
    (source,) = (tmp_path / "out").glob("*.tar.gz")
    assert "-py3-none-manylinux_2_28_" in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        names = {*packed.namelist()}
        record = next(name for name in names if name.endswith(".dist-info/METADATA"))
        facts = message_from_string(packed.read(record).decode())
    assert "phalanx/kernels/compiled/Kernel-0.so" in names
    assert {"phalanx/kernels/api.py", "phalanx/kernels/sm90/jit/runtime_calls.c"} <= names
    assert "phalanx/adapters/transformers/experts.py" in names
    assert not any(name.startswith("phalanx/kernels/adapters/") for name in names)
    always = [need for need in facts.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert always == ["torch>=2.11"]
    assert {"compile", "train", "dev"} <= {*facts.get_all("Provides-Extra", [])}
    with tarfile.open(source) as packed:
        members = {name.partition("/")[2] for name in packed.getnames()}
    assert {"pyproject.toml", "phalanx/kernels/api.py"} <= members
    assert not any(name.endswith(".so") for name in members)
