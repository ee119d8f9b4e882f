"""Imports of the tree, read from its sources: closures, folders and circles.

Lazy imports count, and so do import paths in strings ("phalanx.moe.layer:MoE"), by which tables
name what a configuration asks for.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configs", "extras", "kernels", "moe", "parallel", "scripts")
_PATH = re.compile(r"\bphalanx(?:\.\w+)+")
_LONGEST = 200
"""Characters of a string that may hold import paths; longer ones are documentation."""


@functools.cache
def sources() -> dict[str, str]:
    """File of every module, by its name without `phalanx.`."""
    paths = [ROOT / "train.py", *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))]
    files = [path.relative_to(ROOT) for path in paths if "__pycache__" not in path.parts]
    return {
        ".".join(file.with_suffix("").parts).removesuffix(".__init__"): str(file)
        for file in sorted(files)
    }


def file_of(name: str) -> str | None:
    """File of a module, or of the module that has an attribute of this name."""
    name = name.removeprefix("phalanx.")
    while name:
        if name in sources():
            return sources()[name]
        name = name.rpartition(".")[0]
    return None


@functools.cache
def imported(file: str) -> frozenset[str]:
    """Files that a file imports, lazily or not, without packages that only contain them."""
    return frozenset(found for name in _names(file) if (found := file_of(name)) not in (None, file))


@functools.cache
def reached(file: str) -> frozenset[str]:
    """Files that a file imports or names in strings, and the packages of all of them."""
    found = {*imported(file), *filter(None, map(file_of, _named(file)))} - {file}
    packages = {str(parent / "__init__.py") for f in found for parent in Path(f).parents}
    return frozenset(found | (packages & set(sources().values())) - {file})


def closure(root: str, without: Iterable[str]) -> tuple[set[str], set[tuple[str, str]]]:
    """Files that a program can import, and the imports that lead to what is left out.

    Args:
        root: file of the program.
        without: folders that are left out.
    """
    out = tuple(f"{folder}/" for folder in without)
    seen, todo, crossing = set[str](), [root], set[tuple[str, str]]()
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        crossing |= {(file, other) for other in reached(file) if other.startswith(out)}
        todo += [other for other in reached(file) if not other.startswith(out)]
    return seen, crossing


def mutual(depth: int = 2) -> list[tuple[str, str]]:
    """Pairs of folders that import each other; files above `depth` folders stand for themselves."""
    edges = set[tuple[str, str]]()
    for file in sources().values():
        for other in imported(file):
            edges.add((_room(file, depth), _room(other, depth)))
    return sorted((a, b) for a, b in edges if a < b and (b, a) in edges)


def circles() -> list[list[str]]:
    """Sets of files that import each other, by way of others or not."""
    graph = {file: imported(file) for file in sources().values()}
    return [sorted(part) for part in _components(graph) if len(part) > 1]


def lines(files: Iterable[str]) -> int:
    """Number of lines of some files, without blank lines and those that are a comment."""
    texts = ((ROOT / file).read_text("utf-8") for file in files)
    return sum(
        not line.lstrip().startswith("#") for t in texts for line in t.split("\n") if line.strip()
    )


def _room(file: str, depth: int) -> str:
    return "/".join(file.split("/")[:depth])


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text("utf-8"))


def _names(file: str) -> Iterator[str]:
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _named(file: str) -> Iterator[str]:
    for node in ast.walk(_tree(file)):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and len(text) < _LONGEST:
            yield from _PATH.findall(text)


def _components(graph: Mapping[str, Iterable[str]]) -> Iterator[set[str]]:
    """Strongly connected components: files that reach each other."""
    backwards = defaultdict(set)
    for file, others in graph.items():
        for other in others:
            backwards[other].add(file)
    order, seen = list[str](), set[str]()
    for file in graph:
        _visit(file, graph, seen, order)
    assigned = set[str]()
    for file in reversed(order):
        if file not in assigned:
            part = list[str]()
            _visit(file, backwards, assigned, part)
            yield set(part)


def _visit(
    start: str, graph: Mapping[str, Iterable[str]], seen: set[str], order: list[str]
) -> None:
    """Append what is reached from `start` and not seen, each after what it reaches."""
    if start in seen:
        return
    seen.add(start)
    stack = [(start, iter(graph.get(start, ())))]
    while stack:
        file, others = stack[-1]
        for other in others:
            if other not in seen:
                seen.add(other)
                stack.append((other, iter(graph.get(other, ()))))
                break
        else:
            order.append(file)
            stack.pop()
