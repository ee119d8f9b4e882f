"""Launches reach the CUDA runtime with the right arguments, from any thread, and cheaply.

Run in processes whose runtime only takes notes, see `recording`; so no GPU is needed.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.jit import launch
from phalanx.kernels.sm90.jit.pointers import arguments_of
from tests.kernels.sm90 import recording
from tests.kernels.sm90.echo import EchoConfig, EchoKernel, RecordKernel

HEAD = """
import json, sys, threading, time
from phalanx.kernels.cache import statistics
from phalanx.kernels.sm90.jit import launch as device
from tests.kernels.sm90.echo import Buffer, EchoConfig, EchoKernel, RecordKernel
from tests.kernels.sm90.recording import Address, Runtime, as_device

runtime = Runtime()
runtime.set("arguments_to_read", 4)

def launch(a, b, sizes, config=EchoConfig()):
    names = "blocks", "first", "second"
    device.launch(EchoKernel, config, a=a, b=b, **dict(zip(names, sizes)))

def words(launches):
    mask = (1 << 32) - 1
    return [[*l["arguments"][:2], *(w & mask for w in l["arguments"][2:4])] for l in launches]

def error(*arguments):
    try:
        launch(*arguments)
    except (TypeError, ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    scripts = recording.Scripts(tmp_path_factory.mktemp("kernels"))
    yield lambda script: scripts(HEAD + script)
    scripts.close()


def test_arguments_arrive(run):
    script = """
with as_device(stream=77):
    launch(Address(0x7f0000001234), Address(0x7f0000005670), (9, 2**31 - 1, -2))
    launch(None, Address(16), [1, 2, 3])
notes = runtime.launches()
print(json.dumps([words(notes), [n["grid"][0] for n in notes], [n["block"][0] for n in notes],
                  [n["stream"] for n in notes]]))
"""
    words, grids, blocks, streams = run(script)
    assert words == [
        [0x7F0000001234, 0x7F0000005670, 2**31 - 1, 2**32 - 2],
        [0, 16, 2, 3],
    ]
    assert grids == [9, 1] and blocks == [32, 32] and streams == [77, 77]


def test_values_of_records_arrive_in_their_places(run):
    script = """
with as_device():
    device.launch(RecordKernel, EchoConfig(), other=Buffer(100, None, 200), b=Address(32),
                  buffer=Buffer(1, Address(0x7f0000001234), 2), blocks=3)
    try:
        misaligned = Buffer(0, Address(6), 0)
        device.launch(RecordKernel, EchoConfig(), other=misaligned, b=None, buffer=misaligned,
                      blocks=3)
    except ValueError as e:
        said = str(e)
notes = runtime.launches()
print(json.dumps([words(notes), notes[0]["grid"][0], said]))
"""
    words, blocks, said = run(script)
    assert words == [[0x7F0000001234, 32, 101, 202]] and blocks == 3
    assert said == "RecordKernel: buffer.a must start at a multiple of 4 bytes"


def test_arguments_are_those_of_the_annotations():
    known = arguments_of(RecordKernel)
    assert [*known.parameters] == ["blocks", "buffer", "b", "other"] and known.kinds == "iiQiQiQi"
    assert [*known.values][1:4] == ["buffer.first", "buffer.a", "buffer.second"]
    assert known.values["buffer.a"].align == 4 and known.values["b"].align == 16

    class Wrong(EchoKernel):
        def __call__(self, a: int, stream: Any) -> None: ...

    with pytest.raises(TypeError, match="Wrong: a: .* is no pointer, Int32 or record"):
        arguments_of(Wrong)


def test_each_device_is_loaded_once_and_made_current(run):
    script = """
with as_device(stream=100) as visited:
    for at in (0, 3, 0, 3, 2):
        launch(None, Address(16, at), (1, 0, 0))
print(json.dumps([runtime.get("libraries_loaded"), runtime.get("device_mask"), visited,
                  [n["stream"] for n in runtime.launches()]]))
"""
    loaded, mask, visited, streams = run(script)
    assert loaded == 1
    assert mask == 0b1101  # nothing is left on the node's other GPUs
    assert visited == [3, 3, 2]
    assert streams == [100, 103, 100, 103, 102]


def test_threads_do_not_mix_arguments(run):
    script = """
sys.setswitchinterval(1e-6)

def many(tag):
    for i in range(3000):
        launch(Address(tag << 40), Address((tag << 40) + 16), (tag, tag, i))

threads = [threading.Thread(target=many, args=(tag,)) for tag in range(1, 9)]
with as_device():
    [t.start() for t in threads]
    [t.join() for t in threads]
notes = runtime.launches()
seen = [(n["grid"][0], *w) for n, w in zip(notes, words(notes))]
unmixed = all((tag << 40, (tag << 40) + 16, tag) == (a, b, first) for tag, a, b, first, _ in seen)
complete = {(tag, i) for tag in range(1, 9) for i in range(3000)} == {(t, i) for t, *_, i in seen}
print(json.dumps([len(seen), complete, unmixed, statistics().loaded + statistics().compiled]))
"""
    launched, complete, unmixed, programs = run(script)
    assert launched == 24000 and complete and unmixed
    assert programs == 1  # eight first launches at once load one


def test_errors_name_what_is_wrong(run):
    script = """
with as_device():
    said = [
        error(Address(8), Address(24), (1, 2, 3)),
        error(Address(8), None, (1, 2, 2**31)),
        error(Address(8), None, (1, 2)),
    ]
    runtime.set("launch_error", 719)
    said.append(error(Address(8), None, (1, 2, 3)))
    runtime.set("launch_error", 0)
    said.append(error(Address(8), None, (1, 2, 3)))
print(json.dumps(said))
"""
    misaligned, large, few, refused, fine = run(script)
    assert misaligned == "ValueError: EchoKernel: b must start at a multiple of 16 bytes"
    given = "{'blocks': 1, 'first': 2, 'second': 2147483648}"
    assert large == f"ValueError: EchoKernel takes integers below 2^31, not {given}"
    names = "['a', 'b', 'blocks', 'first', 'second']"
    assert few == f"TypeError: EchoKernel takes {names}, not ['a', 'b', 'blocks', 'first']"
    assert refused == "RuntimeError: kernel not launched: cudaErrorLaunchFailure (719)"
    assert fine is None


def test_configurations_are_kernels_of_their_own(run):
    script = """
with as_device():
    for threads in (32, 64, 32):
        launch(None, Address(16), (1, 2, 3), EchoConfig(threads))
print(json.dumps([[n["block"][0] for n in runtime.launches()], vars(statistics())]))
"""
    blocks, counts = run(script)
    assert blocks == [32, 64, 32]
    assert counts["loaded"] + counts["compiled"] == 2
    again, counts = run(script)
    assert again == blocks and counts["compiled"] == 0 and counts["loaded"] == 2


def test_a_launch_takes_microseconds_of_the_host(run):
    script = """
a, b, times = Address(4), Address(16), []
with as_device():
    for _ in range(200):
        begin = time.perf_counter()
        for _ in range(100):
            launch(a, b, (1, 2, 3))
        times.append((time.perf_counter() - begin) / 100)
print(json.dumps(min(times)))
"""
    assert run(script) < 15e-6


def test_names_in_the_cache_change_with_whatever_code_depends_on(monkeypatch, tmp_path):
    def name(kernel=EchoKernel, config=EchoConfig()):  # noqa: B008
        launch._sources.cache_clear()
        return launch.entry_name(kernel, config)

    package = tmp_path / "kernels" / "sm90"
    shutil.copytree(launch._HERE, package)
    activation = package.parent / "expert_mlp/activation.py"
    activation.parent.mkdir()
    shutil.copy(launch._HERE.parent / "expert_mlp/activation.py", activation)
    names = [name(), name(config=EchoConfig(64)), name(type("Other", (EchoKernel,), {}))]
    monkeypatch.setattr(launch, "_HERE", package)
    assert name() == names[0]  # wherever the package is
    for source in (package / "gemm/tile_scheduler.py", activation):
        text = source.read_text()
        source.write_text(text + "\n")
        names.append(name())
        source.write_text(text)
    assert name() == names[0]
    for fact, value in {"ARCH": "sm_100a", "version": lambda package: "5.0.0"}.items():
        with monkeypatch.context() as patch:
            patch.setattr(launch, fact, value)
            names.append(name())
    with monkeypatch.context() as patch:
        patch.setattr(launch.platform, "machine", lambda: "aarch64")
        names.append(name())
    beside, digest = Path(recording.__file__), launch.digest_of
    with monkeypatch.context() as patch:  # of a kernel that is elsewhere, all files of its folder
        patch.setattr(launch, "digest_of", lambda f: digest(f) + "x" * (beside in f))
        names.append(name())
    launch._sources.cache_clear()
    assert len(set(names)) == len(names) == 9
