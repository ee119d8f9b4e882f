"""Build a repository of kernels for `get_kernel` and `kernelize` of Hugging Face's `kernels`.

    python scripts/lab/release/build_hub_kernel.py [--out FOLDER]

The folder has README.md, and `build/torch-cuda` and `build/torch-cpu` with the same sources: those
files of this project that `phalanx.kernels.api` and the layers of `kernels/adapters/hub_layers.py`
can import. Imports are relative, import paths begin with the name by which a copy is imported, and
so do the names of its ops: two copies, or a copy and the installed package, work in one process.
Nothing is compiled here. A copy compiles the kernels of a Hopper GPU at their first call, by CuTe
DSL, and keeps them in the same cache as all others, under names with a hash of the sources.

    hf upload OWNER/phalanx-moe dist/hub --repo-type kernel --revision v1
"""

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from phalanx import __version__
from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.kernels import api
from phalanx.kernels.availability import CUTLASS_DSL

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "phalanx"
PROGRAMS = ("kernels/api.py", "adapters/hub_layers.py")  # what a copy is for
# Another operation, and the registration of the adapter, which changes transformers.
WITHOUT = ("kernels/rms_norm/", "adapters/transformers/__init__.py")
NAMED = ("kernels/", "extras/blackwell/", "extras/microscaling/")
"""Folders of which a copy has what the tables of `configs/tables` name by import path."""
DATA = (".json", ".c")  # endings of other files that sources read
_PATH = re.compile(r"phalanx(?:\.\w+)+(?::[\w.]+)?")
_FROM = re.compile(rb"from\s+phalanx((?:\.\w+)*)\s+import\b")


def sources() -> dict[str, bytes]:
    """Contents of the files of a copy, by their path in the package."""
    found, todo = dict[str, bytes](), list(PROGRAMS)
    while todo:
        file = todo.pop()
        if file in found or file.startswith(WITHOUT):
            continue
        content = (PACKAGE / file).read_bytes()
        todo += _wanted(ast.parse(content))
        todo += [str(p / "__init__.py") for p in Path(file).parents if _is_package(p)]
        found[file] = portable(content, file)
    for folder in {(PACKAGE / file).parent for file in found}:
        for path in folder.iterdir():
            if path.suffix in DATA:
                found[str(path.relative_to(PACKAGE))] = path.read_bytes()
    return dict(sorted(found.items()))


def _is_package(folder: Path) -> bool:
    return folder != Path(".") and (PACKAGE / folder / "__init__.py").is_file()


def _wanted(tree: ast.Module) -> Iterator[str]:
    """Files of the modules that a module imports, or that a string in it names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from filter(None, map(_file_of, names))
        elif (path := _path_in(node)) and (file := _file_of(path.partition(":")[0])):
            whole = _modules(Path(file).parent) if file.endswith("__init__.py") else [file]
            yield from (name for name in whole if name.startswith(NAMED))


def _path_in(node: ast.AST) -> str | None:
    """An import path of this package that is all of a string."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) and _PATH.fullmatch(value) else None


def _modules(folder: Path) -> list[str]:
    return [str(path.relative_to(PACKAGE)) for path in (PACKAGE / folder).glob("*.py")]


def _file_of(name: str) -> str | None:
    """File of a module, or of the module that has an attribute of this name; None: not ours."""
    first, *parts = name.split(".")
    while first == "phalanx" and parts:
        for file in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
            if (PACKAGE / file).is_file():
                return file
        parts.pop()
    return None


def portable(content: bytes, file: str) -> bytes:
    """Source of a module without the name of this package.

    `from phalanx.a import b` becomes relative, and a string "phalanx.a:b" an expression that begins
    with the name of the package around the module. ValueError for `import phalanx.a`.
    """
    lines = [0]
    for line in content.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    edits = list[tuple[int, int, bytes]]()
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            raise ValueError(f"{file}:{node.lineno}: write `from phalanx... import`")
        if isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            start = lines[node.lineno - 1] + node.col_offset
            found = _FROM.match(content, start)
            assert found, f"{file}:{node.lineno}"
            dots = b"." * len(Path(file).parts)
            edits.append((start, found.end(), b"from " + dots + found[1][1:] + b" import"))
        elif path := _path_in(node):
            assert isinstance(node, ast.Constant) and node.end_lineno and node.end_col_offset
            text = f'(__name__.partition(".")[0] + "{path.removeprefix("phalanx")}")'
            start = lines[node.lineno - 1] + node.col_offset
            edits.append((start, lines[node.end_lineno - 1] + node.end_col_offset, text.encode()))
    for start, end, new in sorted(edits, reverse=True):
        content = content[:start] + new + content[end:]
    return content


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "phalanx"


INIT = '''"""Experts and routers of mixtures, for any model in PyTorch."""

from . import layers
from .kernels.api import *
from .kernels.api import __all__ as _names

__version__ = "{version}"
__all__ = [*_names, "layers"]
'''
LAYERS = '''"""Layers for `kernels.kernelize`."""

from .adapters.hub_layers import Experts, MegaBlocksMoeMLP

__all__ = ["Experts", "MegaBlocksMoeMLP"]
'''


def build(out: Path) -> list[Path]:
    """Write a repository into a folder, in place of an earlier one; returns its variants."""
    files = sources()
    files["__init__.py"] = INIT.format(version=__version__).encode()
    files["layers.py"] = LAYERS.encode()
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    variants = list[Path]()
    for backend in ("cuda", "cpu"):
        variants.append(folder := out / "build" / f"torch-{backend}")
        shutil.rmtree(folder, ignore_errors=True)
        metadata = {
            "id": f"phalanx_moe_{backend}_{digest.hexdigest()[:10]}",
            "name": programs.DISTRIBUTION,
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        for name, content in (files | {"metadata.json": _json(metadata)}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    (out / "README.md").write_text(README.format(names=", ".join(_names()), cutlass=CUTLASS_DSL))
    shutil.copy(ROOT / "LICENSE", out)
    return variants


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _names() -> list[str]:
    return [f"`{name}`" for name in api.__all__]


README = """---
library_name: kernels
license: apache-2.0
tags:
- kernel
- mixture-of-experts
---

# Experts of mixtures

Experts and routers of mixture-of-experts models as functions and modules of PyTorch, with
gradients: fused grouped GEMMs in CuTe DSL on Hopper in bf16 and FP8, `torch._grouped_mm` or plain
PyTorch elsewhere.

```python
import torch
from kernels import get_kernel

phalanx = get_kernel("OWNER/phalanx-moe", version=1, trust_remote_code=True)
x = torch.randn(16, 64, requires_grad=True)
w1, w2 = torch.randn(8, 2 * 128, 64), torch.randn(8, 64, 128)
topk_prob, topk_idx = torch.randn(16, 8).softmax(-1).topk(2)
out = phalanx.grouped_experts(x, topk_idx, topk_prob, w1, w2)  # [16, 64]
```

On Hopper `pip install '{cutlass}'` is needed, which compiles a kernel at its first call, some
seconds each; without it `backend="auto"` takes `torch._grouped_mm`.

Names: {names}.

Layers for `kernelize`: `MegaBlocksMoeMLP`, the MLP of GPT-OSS in transformers, and `Experts`, the
experts of any model that transformers dispatches.

Experts over several GPUs, compiled kernels and the trainer are in the package `phalanx-moe`.
"""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = programs.parser("build_hub_kernel", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist/hub", metavar="FOLDER")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    variants = build(args.out)
    for variant in variants:
        found = [path for path in variant.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in found)
        print(f"{variant}: {pluralize(len(found), 'file')}, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
