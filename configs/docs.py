"""Tables of all knobs in Markdown, from the docstrings under the fields of the schema.

`python -m phalanx.configs.docs` prints them, and writes them between the markers of a page that is
given, docs/configuration.md. Defaults are those of the composed config.yaml, which train.py uses
without arguments.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from phalanx.configs import programs, schema
from phalanx.configs.knobs import get, knobs, sections, shown
from phalanx.configs.load import GROUPS, load

BEGIN, END = "<!-- knobs -->", "<!-- /knobs -->"


def field_docs() -> dict[str, str]:
    """Docstring of every knob that has one, by dotted path; with the entries of its table."""
    files = sorted(Path(schema.__file__).parent.glob("*.py"))
    by_class = dict(chain(*(_classes(ast.parse(f.read_text(encoding="utf-8"))) for f in files)))
    owners = {"": schema.Config, **sections()}
    found = {}
    for path in knobs():
        owner, _, name = path.rpartition(".")
        if name in by_class[owners[owner].__name__]:
            found[path] = by_class[owners[owner].__name__][name]
    for path, knob in knobs().items():
        if meanings := knob.facts.meanings:
            entries = "; ".join(f"`{name}`: {text}" for name, text in meanings.items())
            found[path] += f" {entries}."
    return found


def tables() -> str:
    """One table per group: knob, default, meaning."""
    defaults, docs = load([]), field_docs()
    parts = []
    for group in (name for name in GROUPS if name in sections()):
        rows = [
            f"| `{path}` | {_cell(get(defaults, path))} | {_escaped(docs[path])} |"
            for path in knobs()
            if path.startswith(f"{group}.")
        ]
        parts.append(
            "\n".join([f"### {group}", "", "| knob | default | meaning |", "|---|---|---|"])
        )
        parts[-1] += "\n" + "\n".join(rows)
    return programs.here("\n\n".join(parts))


def insert(text: str) -> str:
    """`text` with the tables between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"expected the markers {BEGIN} and {END}")
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


def _classes(tree: ast.Module) -> Iterator[tuple[str, dict[str, str]]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, dict(_fields(node))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Annotated names that are followed by a string."""
    for field, after in zip(node.body, node.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                yield name, " ".join(str(text).split())


def _cell(value: object) -> str:
    text = shown(value)
    return f"`{text}`" if text else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main(argv: Sequence[str]) -> int:
    """Print the tables, or write them to a page."""
    parser = argparse.ArgumentParser("python -m phalanx.configs.docs", description=__doc__)
    parser.add_argument("page", nargs="?", type=Path, help="Markdown with both markers in it")
    page = parser.parse_args(argv).page
    if page is None:
        print(tables())
        return 0
    try:
        page.write_text(insert(page.read_text(encoding="utf-8")), encoding="utf-8")
    except OSError as error:
        parser.error(f"{page}: {error.strerror}")
    except ValueError as error:  # of `insert`, or no UTF-8
        parser.error(f"{page}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
