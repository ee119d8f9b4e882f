"""Links of the pages when they are built as a site, where the source tree is not beside them.

In a checkout `docs/design.md` links to `../moe/layer.py` and the README to `docs/design.md`. On the
site the pages of the root lie beside those of docs/, and every file or folder of the tree that a
page links to is a page with its text or its list of files.

The API pages are read from a copy of the package's links in which every folder has an
`__init__.py`, without which the reader of docstrings does not look into a folder.
"""

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)(#[^)\s]*)?(\))")
_BLOCK = re.compile(r"(```.*?```)", re.DOTALL)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".toml": "toml"}
_PACKAGE = tempfile.TemporaryDirectory(prefix="phalanx-site-")  # removed when the process ends


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: Any) -> Any:
    """Make the package that the API pages are read from."""
    package = Path(_PACKAGE.name) / "phalanx"
    if not package.exists():
        package.mkdir()
        (package / "__init__.py").symlink_to(ROOT / "phalanx/__init__.py")
        for name in ("configs", "extras", "kernels", "moe", "parallel"):
            (package / name).mkdir()
            (package / name / "__init__.py").touch()
            for path in (ROOT / name).iterdir():
                (package / name / path.name).symlink_to(path)
    handler = config.plugins["mkdocstrings"].config["handlers"]["python"]
    handler["paths"] = [_PACKAGE.name]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, and one for each file or folder outside of docs/ with a link."""
    pages = {path: path.name for path in ROOT.glob("*.md")} | {ROOT / "README.md": "index.md"}
    for path, uri in pages.items():
        files.append(File.generated(config, uri, content=path.read_text("utf-8")))
    every = (*pages, *DOCS.rglob("*.md"))
    linked = {_resolved(path, link) for path in every for link in _links(path)}
    for path in sorted(linked):
        if not _is_page(path) and not (path.is_file() and path.is_relative_to(DOCS)):
            files.append(File.generated(config, _uri(path), content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point relative links at the pages of the site; code blocks stay as they are."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    uri = page.file.src_uri
    origin = ROOT / ("README.md" if uri == "index.md" else uri)
    origin = origin if origin.is_file() else DOCS / uri

    def moved(match: re.Match[str]) -> str:
        path = _resolved(origin, match[2])
        target = os.path.relpath(_uri(path), Path(uri).parent)
        fragment = match[3] if match[3] and _is_page(path) else ""
        return f"{match[1]}{target}{fragment}{match[4]}"

    parts = _BLOCK.split(markdown)
    parts[::2] = [_LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts)


def _links(page: Path) -> list[str]:
    prose = _BLOCK.sub("", page.read_text("utf-8"))
    return [match[2] for match in _LINK.finditer(prose)]


@functools.cache
def _resolved(page: Path, link: str) -> Path:
    return (page.parent / link).resolve()


def _is_page(path: Path) -> bool:
    return path.suffix == ".md" and (path.parent == ROOT or path.is_relative_to(DOCS))


def _uri(path: Path) -> str:
    """Path of a page or file of the site, from the folder of its Markdown files."""
    if path == ROOT / "README.md":
        return "index.md"
    if _is_page(path) or (path.is_file() and path.is_relative_to(DOCS)):
        return str(path.relative_to(ROOT if path.parent == ROOT else DOCS))
    return f"source/{path.relative_to(ROOT)}.md"


def _source_page(path: Path) -> str:
    """Text of a file, or the names in a folder, left out of the search."""
    name = path.relative_to(ROOT)
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if path.is_dir():
        names = sorted(p.name + "/" * p.is_dir() for p in path.iterdir() if p.name[0] not in "._")
        return head + "\n".join(f"- `{entry}`" for entry in names) + "\n"
    fence = "`" * 6
    language = _LANGUAGES.get(path.suffix, "text")
    return f"{head}{fence}{language}\n{path.read_text('utf-8')}\n{fence}\n"
