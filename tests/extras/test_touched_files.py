"""Number of core files that name an addition in code: what adding another one would touch."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ("configs", "moe", "parallel", "kernels")
ROOMS = ("moe/hf/", "kernels/adapters/")
"""Not of the core: they translate from and to formats of others."""
ADDITIONS = {
    "an optimizer": (r"muon|emerging.optimizers", 2),
    "a recipe": (r"nvfp4", 2),
    # `cudnn` alone is the library of Transformer Engine's attention too.
    "a backend": (r"extras.blackwell|kernels=cudnn|nvidia.cudnn", 3),
    "a model part": (
        r"linear.?attention|gated.?delta|full_attention_interval|\bfla\b|qwen3_next"
        r"|a_log|dt_bias|conv1d",
        6,
    ),
}
"""Words by which an addition is named, and the most files."""


def words(source: str) -> Iterator[str]:
    """Names and strings of a module, without comments and docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in (node for node in nodes if id(node) not in docs):
        for _, value in ast.iter_fields(node):
            values = value if isinstance(value, list) else [value]
            yield from (each for each in values if isinstance(each, str))


def naming(pattern: str) -> list[str]:
    """Core files with a word that matches, in any case."""
    found = []
    for path in (path for folder in CORE for path in sorted((ROOT / folder).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(ROOMS) and any(
            re.search(pattern, word, re.IGNORECASE)
            for word in words(path.read_text(encoding="utf-8"))
        ):
            found.append(name)
    return found


@pytest.mark.parametrize("addition", ADDITIONS)
def test_an_addition_touches_few_files_outside_its_folder(addition: str) -> None:
    pattern, most = ADDITIONS[addition]
    found = naming(pattern)
    assert 0 < len(found) <= most, found


def test_only_code_counts() -> None:
    source = '"""Muon."""\n# muon\nx = 1\n"""`muon` of x."""\n\n\ndef f(y):\n    "muon"\n'
    assert set(words(source)) == {"x", "f", "y"}
    assert {"muon", "x.muon_y"} <= {*words("import muon\nz = 'x.muon_y'\n")}
