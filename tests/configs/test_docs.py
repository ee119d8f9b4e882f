"""The knob tables: every field documented, few enough knobs, README up to date."""

from pathlib import Path

import pytest

from phalanx.configs.docs import BEGIN, END, field_docs, insert, tables
from phalanx.configs.knobs import knobs

README = Path(__file__).resolve().parents[2] / "README.md"


def test_every_knob_is_documented() -> None:
    docs = field_docs()
    assert [path for path in knobs() if not docs.get(path, "").endswith(".")] == []


def test_there_are_fewer_than_125_knobs() -> None:
    assert len(knobs()) < 125


def test_tables_hold_every_knob_with_the_default_of_a_bare_run() -> None:
    text = tables()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(knobs())
    assert all(len(row.replace("\\|", "").split("|")) == 5 for row in rows)
    assert "| `model.layers` | `4` | Transformer layers, " in text
    assert "| `data.split` | `98,2` |" in text
    assert (
        "| `parallel.pipeline_layout` |  | Megatron-Core layout, as in `Et\\|(tt\\|)*30mL`" in text
    )


def test_tables_go_between_the_markers() -> None:
    page = insert(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    assert page == f"above\n{BEGIN}\n{tables()}\n{END}\nbelow\n"
    assert insert(page) == page
    with pytest.raises(ValueError, match="markers"):
        insert("no markers")


@pytest.mark.skipif(not README.exists(), reason="no README here")
def test_readme_is_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert insert(text) == text, "run python -m phalanx.configs.docs README.md"
