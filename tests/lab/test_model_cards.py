"""Model cards are those of the records, and name what is there."""

import json
from pathlib import Path

import pytest

from phalanx.configs.records import own
from phalanx.scripts.lab.release import model_cards
from tests.moe.hf.models import MODELS


def test_cards_are_up_to_date() -> None:
    assert model_cards.main(["--check"]) == 0, "run python scripts/lab/release/model_cards.py"


def test_each_model_with_records_has_a_card_with_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    monkeypatch.setattr(model_cards, "CARDS", docs / "cards")
    monkeypatch.setattr(model_cards, "ROOT", tmp_path)
    (tmp_path / "configs").symlink_to(Path(model_cards.__file__).parents[3] / "configs")
    assert model_cards.main(["--check"]) == 1 and not (docs / "cards").exists()
    assert model_cards.main([]) == 0
    for name, record in own().items():
        text = (docs / "cards" / f"{record.model}.md").read_text("utf-8")
        assert f"[{name}]" in text and f"{record.tokens_per_second_per_gpu:,.0f} ±" in text
        assert f"[{record.model}]" in (docs / "cards" / "README.md").read_text("utf-8")
    assert "out of date: docs/cards/README.md" in capsys.readouterr().out
    assert model_cards.main(["--check"]) == 0


def test_logits_of_all_families_are_recorded() -> None:
    errors = json.loads(model_cards.PARITY.read_text("utf-8"))["errors"]
    assert errors.keys() == MODELS.keys()
    assert all(0 < actual["fp32"] < 1e-4 for actual in errors.values())
    text = (model_cards.CARDS / "moonlight_16b_a3b.md").read_text("utf-8")
    assert f"{errors['moonlight']['fp32']:.1e} of a token's in fp32" in text


def test_losses_that_were_recorded_are_shown() -> None:
    text = (model_cards.CARDS / "gpt_oss_20b.md").read_text("utf-8")
    assert "](../measured/compare/losses_gpt_oss_20b_4_layers.png)" in text
