"""The table of all records."""

from phalanx.configs.records import own, published
from phalanx.scripts.lab.records import table

PUBLISHED, OWN = published(), own()


def test_table_has_a_row_for_each() -> None:
    text = table([*PUBLISHED, *OWN.values()])
    assert len(text.splitlines()) == 2 + len(PUBLISHED) + len(OWN)
    assert "| gpt_oss_20b | Automodel | 8 x H100 | bf16 | forced | mock | 13,058 | 299 |" in text
