"""Remembered kernels: one entry for the same code, another one for any other."""

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.jit import launch
from tests.kernels.sm90 import remembered
from tests.kernels.sm90.echo import EchoConfig, EchoKernel


def test_a_kernel_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv(remembered.VARIABLE, str(tmp_path))
    made = []

    def make() -> bytes:
        made.append(len(made))
        return b"code %d" % len(made)

    assert [remembered.fetch(EchoKernel, EchoConfig(), ["x"], make) for _ in range(3)] == [
        b"code 1"
    ] * 3
    (entry,) = tmp_path.glob("*.o")
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")  # a damaged one is made again
    assert remembered.fetch(EchoKernel, EchoConfig(), ["x"], make) == b"code 2"


def test_what_fails_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv(remembered.VARIABLE, str(tmp_path))

    def fail() -> bytes:
        raise ValueError("too many registers")

    for _ in range(2):
        with pytest.raises(ValueError, match="too many registers"):
            remembered.fetch(EchoKernel, EchoConfig(), [], fail)
    assert remembered.fetch(EchoKernel, EchoConfig(), [], lambda: b"fits") == b"fits"


def test_any_change_is_another_entry(tmp_path, monkeypatch):
    source = tmp_path / "source.py"
    source.write_text("1")

    def name(kernel=EchoKernel, config=EchoConfig(), made_by=("x", source)):  # noqa: B008
        return remembered.name(kernel, config, made_by)

    first = name()
    assert name() == first
    names = [first, name(config=replace(EchoConfig(), threads=64)), name(made_by=("y", source))]
    names.append(name(kernel=type("Other", (EchoKernel,), {"__module__": EchoKernel.__module__})))
    source.write_text("2")
    names.append(name())
    source.write_text("1")
    for target, attribute, value in (
        (launch, "_sources", lambda: "other sources"),
        (launch, "version", lambda package: "5.0.0"),
        (launch, "ARCH", "sm_100a"),
        (remembered, "version", lambda package: "0"),
        (remembered, "_OWN", (source,)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, attribute, value)
            names.append(name())
    monkeypatch.setenv("CUTE_DSL_OPT", "0")
    names.append(name())
    monkeypatch.delenv("CUTE_DSL_OPT")
    monkeypatch.setenv("CUTE_DSL_LIBS", "runtime")  # has no part in the code
    assert name() == first and len(set(names)) == len(names) == 11
