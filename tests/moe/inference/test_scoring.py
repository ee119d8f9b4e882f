"""The predicted tokens of a file, each exactly once, and their score."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.text_rows import Reading
from phalanx.moe.data.tokenizer.codec import Codec
from phalanx.moe.inference.scoring import Score, Text, score, text_of
from phalanx.scripts import prepare_data
from tests.moe.data.test_loader import write


class Table:
    """A model whose loss of a label is its number, and a hundredth of the token before it."""

    cfg = SimpleNamespace(model=SimpleNamespace(vocab_size=256))

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def losses(self, tokens_BS: Tensor, labels_BS: Tensor, position_BS: Any = None) -> Tensor:
        assert tokens_BS.shape == labels_BS.shape
        self.length = tokens_BS.size(1)
        self.pairs += zip(tokens_BS.flatten().tolist(), labels_BS.flatten().tolist(), strict=True)
        return labels_BS.float() + tokens_BS.float() / 100


def total(parts: list[Score]) -> Score:
    return sum(parts[1:], parts[0])


@pytest.mark.parametrize("batch", [1, 2, 100])
@pytest.mark.parametrize("count", [2, 5, 6, 7, 11, 41])
def test_every_token_is_predicted_once(count: int, batch: int) -> None:
    ids = np.random.default_rng(0).integers(256, size=count)
    model: Any = Table()
    found = total(list(score(model, Text("x", ids, 9), 5, batch)))
    pairs = list(zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True))
    assert model.length == min(5, count - 1), "a short text is not filled up"
    assert set(model.pairs) >= set(pairs) and len(model.pairs) % model.length == 0
    assert found.tokens == count - 1 and found.text_bytes == 9
    nats = sum(label + token / 100 for token, label in pairs)
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert found.loss == found.nats / found.tokens
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / 9, rel=1e-6)


class Apart(Table):
    """The same, where it is reported where documents lie."""

    def losses(self, tokens_BS: Tensor, labels_BS: Tensor, position_BS: Any = None) -> Tensor:
        self.positions = [*getattr(self, "positions", []), *position_BS.tolist()]
        return super().losses(tokens_BS, labels_BS)


def test_documents_that_do_not_see_each_other(tmp_path: Path) -> None:
    """Every token but the first of a document is predicted once, from its own document."""
    texts = ["abc", "d", "efghij"]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    given = [str(tmp_path / "t.jsonl"), "--bytes", "--workers", "1"]
    assert prepare_data.main([*given, "--output", str(tmp_path / "ids")]) == 0
    for name in ("t.jsonl", "ids"):
        text = text_of(str(tmp_path / name), lambda: Codec(None, (0,)), apart=True)
        assert bytes(text.ids_N.tolist()) == b"abc\0d\0efghij\0" and text.predicted == 10
        assert text.position_N is not None
        assert text.position_N.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5, 6]
        model: Any = Apart()
        found = total(list(score(model, text, 5, 1)))
        assert model.positions[:2] == [[0, 1, 2, 3, 0], [0, 0, 1, 2, 3]]  # pieces begin sequences
        assert model.positions[2][:2] == [0, 1] and 0 not in model.positions[2][1:]
        pairs = list(zip(text.ids_N[:-1].tolist(), text.ids_N[1:].tolist(), strict=True))
        inside = [pair for pair in pairs if pair[0] != 0]
        assert found.tokens == len(inside) == 10 and found.firsts == 3 and found.text_bytes == 10
        assert found.nats == pytest.approx(sum(y + x / 100 for x, y in inside), rel=1e-6)
        assert found.bits_per_byte == pytest.approx(found.loss * 13 / math.log(2) / 10)
        whole = total(list(score(model, text, 100, 4)))
        assert whole == found
    for name in ("t.jsonl", "ids"):
        cut = text_of(str(tmp_path / name), lambda: Codec(None, (0,)), limit=5, apart=True)
        assert bytes(cut.ids_N.tolist()) == b"abc\0d\0" and cut.position_N is not None
        assert cut.position_N.tolist() == [0, 1, 2, 3, 0, 1]
    (tmp_path / "one.jsonl").write_text('{"text": ""}')
    with pytest.raises(DataError, match="holds no tokens to predict"):
        text_of(str(tmp_path / "one.jsonl"), lambda: Codec(None, (0,)), apart=True)


def test_documents_of_several_sequences_are_scored_whole(tmp_path: Path) -> None:
    prefix = write(tmp_path / "ids", [[7, *range(1, 15)]] * 4, cuts=[5, 4, 6])
    text = text_of(prefix, lambda: Codec(None, (0,)), apart=True)
    assert text.position_N is not None and text.predicted == 4 * 14
    assert text.position_N.tolist() == [*range(15)] * 4
    cut = text_of(prefix, lambda: Codec(None, (0,)), limit=16)
    assert len(cut.ids_N) == 30, "whole documents until there are so many tokens"


def test_scores_add_up_as_far_as_bytes_are_known() -> None:
    one, two, unknown = Score(2.0, 4, 3), Score(1.0, 1, 5), Score(1.0, 2, None)
    assert one + two == Score(3.0, 5, 8) and one + unknown == Score(3.0, 6, None)
    assert (one + unknown).bits_per_byte is None
    assert one.perplexity == math.exp(0.5) and Score(1e9, 1, None).perplexity == math.inf


def test_text_and_its_tokens_are_the_same_file(tmp_path: Path) -> None:
    texts = ["def é", "", "zwei", "drei"]
    lines = "\n".join(json.dumps({"body": text}) for text in texts)
    (tmp_path / "t.jsonl").write_text(lines)
    given = [str(tmp_path / "t.jsonl"), "--bytes", "--key", "body", "--workers", "1"]
    assert prepare_data.main([*given, "--output", str(tmp_path / "ids")]) == 0

    def codec() -> Codec:
        return Codec(None, (0,))

    text = text_of(str(tmp_path / "t.jsonl"), codec, reading=Reading("body"))
    pair = text_of(str(tmp_path / "ids"), codec)
    assert text.ids_N.tolist() == pair.ids_N.tolist()
    expected = b"\0" + b"\0".join(t.encode() for t in texts if t) + b"\0"
    assert bytes(text.ids_N.tolist()) == expected
    assert text.text_bytes == pair.text_bytes == 14
    (tmp_path / "t.txt").write_text("zwei\ndrei\n")
    by_line = text_of(str(tmp_path / "t.txt"), codec, reading=Reading(lines=True))
    assert bytes(by_line.ids_N.tolist()) == b"\0zwei\0drei\0"
    for limit, kept in ((1, 8), (7, 8), (8, 13), (17, 18), (99, 18)):
        some = text_of(str(tmp_path / "t.jsonl"), codec, reading=Reading("body"), limit=limit)
        cut = text_of(str(tmp_path / "ids"), codec, limit=limit)
        assert some.ids_N.tolist() == cut.ids_N.tolist() == list(expected[:kept]), limit
        assert cut.text_bytes == (14 if kept == 18 else None)


def test_what_cannot_be_scored_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError, match="empty.txt holds no tokens to predict"):
        text_of(str(empty), lambda: Codec(None, (0,)))
    with pytest.raises(DataError, match="ends a document is not known: give --eod TOKEN"):
        text_of(str(empty), lambda: Codec(None, ()))
    with pytest.raises(DataError, match="none does not exist; expected .jsonl, .json, .txt"):
        text_of(str(tmp_path / "none"), lambda: Codec(None, (0,)))
    with pytest.raises(DataError, match="s3://bucket/x.txt is an address; evaluate copies"):
        text_of("s3://bucket/x.txt", lambda: Codec(None, (0,)))
    with pytest.raises(DataError, match="is none of .jsonl, .json, .txt"):
        text_of(str(tmp_path), lambda: Codec(None, (0,)))
    model: Any = Table()
    with pytest.raises(DataError, match="x has token id 300, but model.vocab_size=256"):
        list(score(model, Text("x", np.array([1, 300]), None), 5, 1))
