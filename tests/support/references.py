"""References in comments, docstrings and pages to what is in the tree, and the words of docs.

Read without importing anything: `ast` for Python, regular expressions for the rest.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "extras", "kernels", "moe", "parallel", "scripts", "tests")
SOURCES = (
    *sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")),
    ROOT / "train.py",
    ROOT / "phalanx/__init__.py",
)
ELSEWHERE = {
    "libraries": {
        "CheckpointWithoutOutput",
        "flash_attn_varlen_func",
        "ft_launcher",
        "fully_reshardable",
        "fused_residual_rmsnorm",
        "parallel_cross_entropy",
        "split_matrix",
    },
    "variables of NCCL": {
        "NCCL_CROSS_NIC",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_HCA",
        "NCCL_IB_RETRY_CNT",
        "NCCL_IB_SL",
        "NCCL_IB_TC",
        "NCCL_IB_TIMEOUT",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_NET_PLUGIN",
        "NCCL_NVLS_ENABLE",
        "LD_LIBRARY_PATH",
        "show_gids",
    },
    "ranges of a profile and metrics": {"moe/route", "moe/dispatch", "moe/combine", "moe/load_max"},
    "files that a reader writes": {"configs/model/deepseek_moe_16b.yaml"},
}
"""Names that look like this tree's and are not in it, by where they are."""
_EMPTY_BASES = {"ABC", "Enum", "IntEnum", "NamedTuple", "Protocol", "StrEnum", "TypedDict"}
_OPENING = re.compile(r"(Of|That|Those|What|Where|By|Here|Whose|Who)\b")
_PLACEHOLDER = re.compile(r"(?<![A-Za-z])(NAME|N)(?![A-Za-z])|_N$")
_PATH = re.compile(rf"(?<![\w/.:-])(?:{'|'.join((*PACKAGES, 'docs'))})/[\w./-]*\w")
_DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")
_BARE = re.compile(r"`([A-Za-z]\w*_\w*|[A-Z][a-z]+[A-Z]\w*)(?:\(\))?`")


def blocks(tree: ast.Module) -> Iterator[ast.AST]:
    """The module, statements, and their parts that have statements; a tenth of all nodes."""
    todo: list[ast.AST] = [tree]
    for node in todo:
        yield node
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt | ast.excepthandler | ast.match_case):
                todo.append(part)


@functools.cache
def docs(tree: ast.Module) -> tuple[tuple[int, str], ...]:
    """Line and text of every docstring and attribute doc."""
    return tuple(
        (statement.value.lineno, statement.value.value.strip())
        for node in blocks(tree)
        for statement in (node.body if isinstance(getattr(node, "body", None), list) else ())
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def openings(path: Path) -> list[str]:
    """Docs that begin with a genitive or a relative clause, which names no thing."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for line, text in docs(parsed(path))
        if _OPENING.match(text)
    ]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comment; those of successive lines are one text."""
    with tokenize.open(path) as file:
        source = file.read()
    first, lines, last = 0, list[str](), -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0]
            if row != last + 1 and lines:
                yield first, " ".join(lines)
                lines = []
            first, last = (first if lines else row), row
            lines.append(token.string.lstrip("# "))
    if lines:
        yield first, " ".join(lines)


def dead(path: Path, text: str, line: int = 1) -> list[str]:
    """References of a text to paths, modules and names that do not exist.

    Args:
        path: File of the text; paths may be relative to its folder.
        text: Comment, docstring, or page without its code blocks.
        line: First line of the text in the file.
    """
    known = set[str]().union(*ELSEWHERE.values())
    found = [(m.start(), m[0]) for m in _PATH.finditer(text) if not _file(path, m[0])]
    found += [(m.start(), m[1]) for m in _DOTTED.finditer(text) if not _dotted(m[1])]
    found += [(m.start(), m[1]) for m in _BARE.finditer(text) if m[1] not in words()]
    where = path.relative_to(ROOT)
    return [
        f"{where}:{line + text.count(chr(10), 0, at)}: {name}"
        for at, name in sorted(found)
        if name not in known and not _PLACEHOLDER.search(name)
    ]


def _file(path: Path, name: str) -> bool:
    """True if a path exists, with `.py` or without, or if one starts with it, as in `own_*`."""
    candidates = [ROOT / name, path.parent / name]
    return any(
        c.exists()
        or c.with_suffix(".py").exists()
        or (name[-1] == "_" and [*c.parent.glob(f"{c.name}*")])
        for c in candidates
    )


def _dotted(name: str) -> bool:
    """True if a dotted name is a knob, a module or its member, or not of this tree."""
    parts = name.removeprefix("phalanx.").split(".")
    if parts[-1] in ("py", "sh", "sbatch", "md"):
        return f"{parts[-2]}.{parts[-1]}" in _files()
    if name in _knobs():
        return True
    if parts[0] in PACKAGES:
        return any(
            _module(parts[:at]) is not None and _defined(_module(parts[:at]), parts[at:])
            for at in range(1, len(parts) + 1)
        )
    if parts[0] in _groups():
        stems = [path for path in SOURCES if path.stem == parts[0]]
        return any(_defined(stem, parts[1:]) for stem in stems) or parts[1] in _modules(parts[0])
    owners = classes().get(parts[0], [])
    return not owners or any(_member(owner, parts[1]) for owner in owners)


def _module(parts: list[str]) -> Path | None:
    stem = ROOT.joinpath(*parts)
    if stem.is_dir():
        return stem
    return stem.with_suffix(".py") if stem.with_suffix(".py").is_file() else None


def _defined(module: Path | None, parts: list[str]) -> bool:
    assert module is not None
    if not parts:
        return True
    if module.is_dir():
        module = module / "__init__.py"
        if not module.is_file():
            return False
    top = {n for node in parsed(module).body for n in _names(node)}
    return parts[0] in top


def _names(node: ast.stmt) -> list[str]:
    """Names that a statement defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.TypeAlias(name=ast.Name(id=name)):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name for alias in names]
        case ast.If() | ast.Try():
            inner = [*node.body, *node.orelse]
            inner += [s for h in getattr(node, "handlers", ()) for s in h.body]
            return [name for statement in inner for name in _names(statement)]
    return []


def _member(owner: ast.ClassDef, name: str) -> bool:
    """True if a class may have an attribute; bases of libraries may have any."""
    if any(name in _names(node) for node in owner.body):
        return True
    for node in ast.walk(owner):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute) if attribute == name:
                return True
    bases = [b.value if isinstance(b, ast.Subscript) else b for b in owner.bases]
    bases = [b for b in bases if not (isinstance(b, ast.Name) and b.id in _EMPTY_BASES)]
    known = [classes().get(b.id if isinstance(b, ast.Name) else "", []) for b in bases]
    return any(not found or any(_member(base, name) for base in found) for found in known)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Syntax of a file."""
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Classes of the tree by name, without those of tests, which stand for classes of libraries."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in SOURCES:
        if path.is_relative_to(ROOT / "tests"):
            continue
        for node in blocks(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@functools.cache
def words() -> frozenset[str]:
    """Identifiers of the code and words of its strings that are not docs, and of other sources."""
    found: set[str] = set()
    for path in SOURCES:
        tree = parsed(path)
        texts = {line for line, _ in docs(tree)}
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.keyword(arg=str(name)):
                    found.add(name)
                case ast.alias(name=name, asname=other):
                    found.update((*name.split("."), other or name))
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Constant(value=str(text)) if node.lineno not in texts:
                    found.update(re.findall(r"\w+", text))
        found.add(path.stem)
        found.add(path.parent.name)
    for path in ROOT.rglob("*"):
        if path.suffix in (".yaml", ".toml", ".sh", ".sbatch", ".json") and path.is_file():
            if "measured" in path.parts or any(part.startswith(".") for part in path.parts[1:]):
                continue
            found.update(re.findall(r"\w+", path.read_text("utf-8", errors="replace")))
            found.add(path.stem)
    return frozenset(found)


@functools.cache
def _files() -> frozenset[str]:
    pages = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").glob("*.s*"))
    return frozenset(path.name for path in (*SOURCES, *pages))


@functools.cache
def _modules(folder: str) -> frozenset[str]:
    """Modules in the folders of this name, as `cache` in moe/data."""
    return frozenset(path.stem for path in SOURCES if path.parent.name == folder)


@functools.cache
def _groups() -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in _knobs())


@functools.cache
def _knobs() -> frozenset[str]:
    from phalanx.configs.knobs import knobs, sections

    return frozenset((*knobs(), *sections()))
