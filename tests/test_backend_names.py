"""No code compares a backend, optimizer or recipe by name: facts stand in `configs.tables`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.configs.tables import backends
from phalanx.configs.tables.layers import MIXERS
from phalanx.configs.tables.optimizers import OPTIMIZERS
from phalanx.configs.tables.recipes import RECIPES

ROOT = Path(__file__).parents[1]
TABLES = (
    backends.EXPERT_BACKENDS,
    backends.ATTENTION_BACKENDS,
    *(mixer.backends for mixer in MIXERS.values()),
    backends.NORM_BACKENDS,
    OPTIMIZERS,
    {name for name, facts in RECIPES.items() if facts.build},
)
NAMES = {name for table in TABLES for name in table}
FOLDERS = ("configs", "extras", "kernels", "moe", "parallel")
OWN = {ROOT / "extras/microscaling", ROOT / "extras/jax"}
"""Folders of two recipes, which differ there, and of JAX's backends, which are not those here."""


def compared(source: str) -> Iterator[int]:
    """Lines that compare something with a name, or with a collection that has one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            equality = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
            if not all(isinstance(op, equality) for op in node.ops):
                continue
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        else:
            continue
        if any(_names(operand) for operand in operands):
            yield node.lineno if isinstance(node, ast.Compare) else node.value.lineno


def _names(operand: ast.expr) -> bool:
    items = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
    return any(isinstance(item, ast.Constant) and item.value in NAMES for item in items)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_of_an_implementation_is_compared(folder: str) -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent not in OWN
        for line in compared(path.read_text(encoding="utf-8"))
    ]
    assert lines == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('x == "fused"', 1),
        ('if backend in ("torch", "te"): pass', 1),
        ('match name:\n    case "cudnn": pass', 1),
        ('x = "fused"', 0),
        ('x == "alltoall"', 0),
        ('facts["torch"].cuda', 0),
    ],
)
def test_comparisons_are_found(source: str, count: int) -> None:
    assert len(list(compared(source))) == count
