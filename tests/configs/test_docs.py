"""The knob tables: every field documented, few enough knobs, docs/configuration.md up to date."""

from pathlib import Path

import pytest

from phalanx.configs.docs import BEGIN, END, field_docs, insert, main, tables
from phalanx.configs.knobs import knobs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_every_knob_is_documented() -> None:
    docs = field_docs()
    assert [path for path in knobs() if not docs.get(path, "").endswith(".")] == []


def test_there_are_170_knobs_at_most() -> None:
    assert len(knobs()) <= 170


def test_tables_hold_every_knob_with_the_default_of_a_bare_run() -> None:
    text = tables()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(knobs())
    assert all(len(row.replace("\\|", "").split("|")) == 5 for row in rows)
    assert "| `model.layers` | `4` | Number of transformer layers, " in text
    assert "| `data.split` | `98,2` |" in text
    assert "| `parallel.pipeline_layout` |  | Pipeline layout of " in text
    assert "as in `Et\\|(tt\\|)*30mL`; empty" in text


def test_tables_go_between_the_markers() -> None:
    page = insert(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    assert page == f"above\n{BEGIN}\n{tables()}\n{END}\nbelow\n"
    assert insert(page) == page
    with pytest.raises(ValueError, match="markers"):
        insert("no markers")


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert insert(text) == text, "run python -m phalanx.configs.docs docs/configuration.md"


def test_the_command_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and capsys.readouterr().out == f"{tables()}\n"
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert main([str(page)]) == 0 and page.read_text() == f"{BEGIN}\n{tables()}\n{END}\n"


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--help"], 0, "usage: python -m phalanx.configs.docs"),
        (["nowhere/page.md"], 2, "nowhere/page.md: No such file or directory"),
        ([__file__], 2, "expected the markers"),
        (["--fast"], 2, "unrecognized arguments"),
    ],
)
def test_the_command_has_no_traceback(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    out, err = capsys.readouterr()
    assert left.value.code == code and said in (err if code else out)
