"""Lint of docs and pages: how they begin, what they refer to, how long their lines are."""

from pathlib import Path

import pytest

from tests.support import pages, references
from tests.support.references import ROOT, SOURCES, comments, dead, docs, openings, parsed

FOLDERS = sorted({path.relative_to(ROOT).parts[0] for path in SOURCES})
GONE = "Moe" + "Stratum"  # whole it would be a word of the tree
PAGES = [path for path in pages.PATHS if "measured" not in path.parts]


def in_folder(name: str) -> list[Path]:
    return [path for path in SOURCES if path.relative_to(ROOT).parts[0] == name]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docs_name_what_they_describe(folder: str) -> None:
    """Noun phrases and sentences: "Number of nodes", not "Of nodes: how many"."""
    assert [line for path in in_folder(folder) for line in openings(path)] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_refers_to_what_exists(folder: str) -> None:
    found = list[str]()
    for path in in_folder(folder):
        for line, text in (*docs(parsed(path)), *comments(path)):
            found += dead(path, text, line)
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_refer_to_what_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # names what there was
    assert dead(page, pages.without_blocks(page.read_text("utf-8"))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_pages_fit_a_screen(page: Path) -> None:
    """At most 120 columns but for tables, code, and a link or picture that fills a line."""
    lines = pages.without_blocks(page.read_text("utf-8")).splitlines()
    long = [(at, line) for at, line in enumerate(lines, 1) if len(line) > 120]
    assert [f"{at}: {line}" for at, line in long if not pages.unbreakable(line)] == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("See `moe.layer` and `kernels.registry.resolve`.", []),
        ("See `moe.stratum`.", ["moe.stratum"]),
        ("See `kernels.registry.dissolve()`.", ["kernels.registry.dissolve"]),
        ("Set `optim.lr` or `optim.rate`.", ["optim.rate"]),
        ("In moe/layer.py, moe/gone.py and docs/measured.", ["moe/gone.py"]),
        (f"A `MoELayer`, a `{GONE}`, a `top_k`, a `top_{GONE}`.", [GONE, f"top_{GONE}"]),
        ("`RunConfig.steps` or `RunConfig.strides`", ["RunConfig.strides"]),
        ("`torch.nn.functional.nothing` is theirs, scripts/NAME.py anybody's.", []),
    ],
)
def test_dead_references_are_found(text: str, missing: list[str]) -> None:
    path = ROOT / "train.py"
    assert [line.rpartition(" ")[2] for line in dead(path, text)] == missing


def test_openings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""A module."""\n\nSIZE = 3\n"""Of a tile."""\nRATE = 1\n"""Whatever it is."""\n'
    )
    monkeypatch.setattr(references, "ROOT", tmp_path)
    assert openings(path) == ["module.py:4: Of a tile."]


def test_comments_of_successive_lines_are_one() -> None:
    lines = dict(comments(ROOT / "tests/support/references.py"))
    assert all(text for text in lines.values())
