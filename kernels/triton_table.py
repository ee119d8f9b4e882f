"""Launches of our Triton kernels by the shipped models, so that they can be compiled ahead.

Triton compiles a kernel for the types, alignments and constants of a launch. `triton_table.jsonl`
has those of training steps on a Hopper GPU, as `scripts/lab/record_triton.py` recorded them, a
launch a line: the kernel, its arguments, and options that are not Triton's defaults. Arguments: a
list of a type and, if the value is a multiple of it, 16; any other JSON value is a constant, which
is compiled in. A row that the sources no longer have an equal launch for costs its compilation and
nothing else: a kernel that is not found in the folder is compiled at its first launch.
"""

import hashlib
import json
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource, compile, make_backend
from triton.compiler.compiler import get_cache_key
from triton.runtime import build
from triton.runtime.cache import _base32, get_cache_manager
from triton.runtime.jit import get_cache_invalidating_env_vars

FILE = Path(__file__).with_name("triton_table.jsonl")
FOLDER = "triton"
"""Folder of Triton's cache in that of our kernels; train.py sets it."""
_TARGET = GPUTarget("cuda", 90, 32)
_PACKAGE = "phalanx."
_DIVISOR = "tt.divisibility"


@dataclass(frozen=True)
class Launch:
    """A line of the table."""

    line: str

    @property
    def label(self) -> str:
        """Kernel and arguments, as `build_kernels.py --list` prints them."""
        return f"Triton {self._fields['kernel']} {' '.join(map(_text, self._fields['args']))}"

    @cached_property
    def _fields(self) -> dict[str, Any]:
        return dict(json.loads(self.line))

    def build(self, folder: Path) -> None:
        """Compile the kernel for sm_90a and what launches it, unless they are there."""
        with _cache_in(folder):
            source, options = self._source()
            kernel = compile(source, target=_TARGET, options=options)
            for module in _modules(source, kernel.metadata):
                module.build(folder)

    def is_built(self, folder: Path) -> bool:
        with _cache_in(folder):
            source, given = self._source()
            backend = make_backend(_TARGET)
            options = backend.parse_options(given)
            key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
            if not (_entry(folder, key) / f"{source.name[:150]}.json").exists():
                return False
            kernel = compile(source, target=_TARGET, options=given)  # reads the entry
            return all(module.is_built(folder) for module in _modules(source, kernel.metadata))

    def _source(self) -> tuple[ASTSource, dict[str, Any]]:
        fields = self._fields
        function = resolve_name(_PACKAGE + fields["kernel"])
        arguments, names = fields["args"], function.arg_names
        if len(arguments) != len(names):
            raise ValueError(
                f"{FILE.name} has {len(arguments)} arguments of {fields['kernel']}, which takes "
                f"{len(names)}: record it with scripts/lab/record_triton.py"
            )
        typed = {at: each for at, each in enumerate(arguments) if isinstance(each, list)}
        signature = {
            name: typed[at][0] if at in typed else "constexpr" for at, name in enumerate(names)
        }
        constants = {(at,): _constant(each) for at, each in enumerate(arguments) if at not in typed}
        aligned = {
            (at,): [[_DIVISOR, each[1]]] if each[1] > 1 else []
            for at, each in typed.items()
            if len(each) == 2
        }
        return ASTSource(function, signature, constants, aligned), dict(fields["options"])


@dataclass(frozen=True)
class _Module:
    """An extension of Python in C that Triton compiles: one a signature, and one for all."""

    name: str
    source: str

    def is_built(self, folder: Path) -> bool:
        return (_entry(folder, self._key) / self._file).exists()

    def build(self, folder: Path) -> None:
        """`triton.runtime.build.compile_module_from_src` without loading what needs a driver."""
        if self.is_built(folder):
            return
        with tempfile.TemporaryDirectory() as temporary:
            source = Path(temporary) / f"{self.name}.c"
            source.write_text(self.source)
            _write_stub(Path(temporary))
            # The stub has none of the functions that the module calls.
            link = ["-Wl,--no-as-needed", *(f"-l:{name}" for name in driver.libraries)]
            found = [temporary], driver.include_dirs, list[str](), link
            made = Path(build._build(self.name, str(source), temporary, *found)).read_bytes()
            get_cache_manager(_digest(self._key)).put(made, self._file, binary=True)

    @property
    def _file(self) -> str:
        return f"{self.name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    @property
    def _key(self) -> str:
        return self.source + build.platform_key()


def _entry(folder: Path, key: str) -> Path:
    """Triton's folder of a key; its own managers make it where it is missing."""
    return folder / FOLDER / _base32(_digest(key))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _modules(source: ASTSource, metadata: Any) -> list[_Module]:
    launcher = driver.make_launcher(
        source.constants, dict(source.signature), getattr(metadata, "tensordesc_meta", None)
    )
    utils = Path(driver.__file__).with_name("driver.c").read_text()
    return [_Module("__triton_launcher", launcher), _Module("cuda_utils", utils)]


def _write_stub(folder: Path) -> None:
    """A library of CUDA's driver to link with where there is none; the loader finds the real."""
    source, (name,) = folder / "stub.c", driver.libraries
    source.touch()
    flags = [f"-Wl,-soname,{name}"]
    Path(build._build("stub", str(source), str(folder), [], [], [], flags)).rename(folder / name)


def launches() -> list[Launch]:
    """Launches of the table."""
    return [Launch(line) for line in FILE.read_text().splitlines()]


def described(specialization: Mapping[str, Any]) -> str | None:
    """A line for Triton's description of a kernel that it compiled; None for those of others."""
    if not specialization["name"].startswith(_PACKAGE):
        return None
    constants, attributes = (
        _by_position(specialization, "constant"),
        _by_position(specialization, "attrs"),
    )
    arguments: list[Any] = []
    for at, type_ in enumerate(specialization["signature"].values()):
        if type_ == "constexpr":
            arguments.append(constants[at])
        else:
            # An attribute without a value is an integer or address that 16 does not divide, none at
            # all an argument that is not specialised: they are other entries of Triton's folder.
            divisor = [dict(attributes[at]).get(_DIVISOR, 1)] if at in attributes else []
            arguments.append([type_, *divisor])
    usual = vars(make_backend(_TARGET).parse_options({}))
    given = {k: v for k, v in specialization["options"].items() if _plain(usual[k]) != _plain(v)}
    fields = {
        "kernel": specialization["name"].removeprefix(_PACKAGE),
        "args": arguments,
        "options": given,
    }
    return json.dumps(fields, separators=(",", ":"))


def _text(argument: Any) -> str:
    if isinstance(argument, list):
        return ":".join(str(each) for each in argument)
    return str(argument)


def _by_position(specialization: Mapping[str, Any], kind: str) -> dict[int, Any]:
    keys, values = specialization[f"{kind}_keys"], specialization[f"{kind}_vals"]
    return {position: value for (position,), value in zip(keys, values, strict=True)}


def _constant(value: Any) -> Any:
    import triton.language as tl

    return tl.dtype(value) if isinstance(value, str) and tl.dtype.is_dtype(value) else value


def _plain(value: Any) -> Any:
    """As JSON has it: lists for tuples."""
    return json.loads(json.dumps(value, default=str))


@contextmanager
def _cache_in(folder: Path) -> Any:
    with knobs.cache.scope():
        knobs.cache.dir = str(folder / FOLDER)
        yield
