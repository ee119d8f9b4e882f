"""Kernels of flash-attn-4 compiled ahead, kept, and beside ours in one compiler; without a GPU."""

import json
import os
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path

import pytest

pytest.importorskip("flash_attn")  # the import of its part `cute` takes seconds

from phalanx.kernels import cache, library_objects
from phalanx.kernels.cache import Cache
from phalanx.kernels.core_attention import fa4, fa4_library
from phalanx.kernels.core_attention.fa4 import SHIPPED, AttentionLayer
from phalanx.kernels.sm90.jit import launch
from phalanx.kernels.sm90.jit.shipped import SHIPPED as OUR_SHIPPED
from tests.kernels.sm90 import remembered

ROOT = Path(cache.__file__).resolve().parents[1]
SMALL, KERNELS = AttentionLayer(1, 32, 32), 4
OURS = ("Fc1Kernel", "TopkKernel")

BOTH = f"""
import json, sys
from pathlib import Path
from phalanx.kernels import cache
from phalanx.kernels.core_attention import fa4
from phalanx.kernels.core_attention.fa4 import AttentionLayer
from phalanx.kernels.sm90.jit import launch
from phalanx.kernels.sm90.jit.shipped import SHIPPED

where, theirs_first, imported = Path(sys.argv[1]), sys.argv[2] == "theirs", []


def ours():
    imported.append("flash_attn.cute" in sys.modules)
    for wanted in {OURS!r}:
        kernel, config = next(pair for pair in SHIPPED if pair[0].__name__ == wanted)
        launch.build(kernel, config, cache.Cache(where))


def theirs():
    fa4.build({SMALL}, where)


for make in (theirs, ours) if theirs_first else (ours, theirs):
    make()
print(json.dumps([imported[0], vars(cache.statistics())]))
"""


def entries(where: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in where.glob("*.o")}


def both_orders(tmp: Path) -> dict[str, dict[str, str]]:
    """Entries, in base 64, that a process each has made, beginning with our kernels or theirs."""
    started = {}
    for first in ("ours", "theirs"):
        (tmp / first).mkdir()
        started[first] = subprocess.Popen(
            [sys.executable, "-c", BOTH, str(tmp / first), first],
            cwd=ROOT,
            env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for first, process in started.items():
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        imported, counts = json.loads(out)
        assert imported == (first == "theirs")
        assert (counts["compiled"], counts["loaded"]) == (len(OURS) + KERNELS, 0)
    return {
        first: {name: b64encode(data).decode() for name, data in entries(tmp / first).items()}
        for first in started
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Folders with the entries of `both_orders`."""
    pairs = [next(p for p in OUR_SHIPPED if p[0].__name__ == name) for name in OURS]
    names = [launch.entry_name(*pair) for pair in pairs] + sorted(fa4.entries(SMALL))
    sources = [
        Path(__file__),
        *map(Path, (m.__file__ for m in (fa4, fa4_library, library_objects))),
    ]
    data = remembered.fetch(
        *pairs[0],
        [*names, *sources],
        lambda: json.dumps(both_orders(tmp_path_factory.mktemp("made"))).encode(),
    )
    folders = {}
    for first, found in json.loads(data).items():
        folders[first] = tmp_path_factory.mktemp(first)
        for name, text in found.items():
            (folders[first] / name).write_bytes(b64decode(text))
    return folders


def test_neither_changes_what_the_compiler_makes_of_the_other(made):
    """quack, which flash-attn-4 imports, gives CuTe DSL's tensors other indexing and its
    preprocessor other branches. Names and bytes of objects, machine code among them, stay."""
    ours, theirs = entries(made["ours"]), entries(made["theirs"])
    assert ours.keys() == theirs.keys() and len(ours) == len(OURS) + KERNELS
    assert [name for name, data in ours.items() if data != theirs[name]] == []


def test_a_second_build_only_loads(made):
    before, there = cache.statistics(), entries(made["ours"])
    fa4.build(SMALL, made["ours"])
    after = cache.statistics()
    assert (after.compiled - before.compiled, after.loaded - before.loaded) == (0, KERNELS)
    assert entries(made["ours"]) == there
    assert fa4.entries(SMALL) <= there.keys()


def test_entries_are_those_of_the_library_s_choices():
    names = {layer: fa4.entries(layer) for layer in SHIPPED}
    for layer, entries in names.items():
        labels = sorted(name.rpartition("-")[0] for name in entries)
        # Keys and values of a group are sums, too; of 32 channels by the kernel of the queries.
        ends = 1 if layer.group == 1 or layer.d == 32 else 2
        assert labels.count("AttentionForward") == labels.count("AttentionBackward") == 1
        assert labels.count("AttentionBackwardStart") == 1
        assert labels.count("AttentionBackwardEnd") == ends
        assert fa4.entries(layer) == entries
    backward = [next(n for n in e if n.startswith("AttentionBackward-")) for e in names.values()]
    assert len(set(backward)) == len(SHIPPED)


@pytest.mark.parametrize("fact", ["version", "_host"])
def test_another_version_or_processor_is_another_entry(fact, monkeypatch):
    (first, *_) = sorted(fa4.entries(SHIPPED[0]))
    monkeypatch.setattr(library_objects, fact, lambda *package: ("x86_64", "other"))
    assert first not in fa4.entries(SHIPPED[0])


def test_a_failure_lets_others_compile(tmp_path, monkeypatch):
    """The lock of an entry ends with the call, and what fails is not counted or kept."""

    def fail(*args, **kwargs):
        raise ValueError("too many registers")

    layer = AttentionLayer(1, 96, 96)
    before = cache.statistics()
    with monkeypatch.context() as patch:
        patch.setattr("flash_attn.cute.interface.cute.compile", fail)
        for _ in range(2):
            with pytest.raises(ValueError, match="too many registers"):
                fa4.build(layer, tmp_path)
    assert entries(tmp_path) == {} and cache.statistics() == before
    patient = Cache(tmp_path, patience=0.2)
    (name,) = [n for n in fa4.entries(layer) if n.startswith("AttentionForward")]
    assert patient.fetch(name, lambda: b"made") == b"made"
