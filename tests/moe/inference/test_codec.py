"""Which tokenizer a checkpoint's text goes through, and which are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.codec import Codec, codec_of, shown
from phalanx.moe.data.tokenizer.special_tokens import sidecars
from phalanx.scripts import prepare_data
from phalanx.scripts.evaluate import check_pair


def common(**data: Any) -> dict[str, Any]:
    return {"config": {"data": data}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = {"<end>": 0, "a": 1, "b": 2, "?": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<end>"])
    path = tmp_path / "tok" / "tokenizer.json"
    path.parent.mkdir()
    made.save(str(path))
    return path


@pytest.fixture
def corpus(tmp_path: Path, tokenizer: Path) -> str:
    (tmp_path / "text.txt").write_text("a b a")
    given = ["--tokenizer", str(tokenizer), "--eod", "<end>", "--output", str(tmp_path / "ids")]
    assert prepare_data.main([str(tmp_path / "text.txt"), *given, "--workers", "1"]) == 0
    return str(tmp_path / "ids")


def test_the_embedded_corpus_is_of_bytes() -> None:
    codec = codec_of(common(source="embedded"), 256, None)
    assert codec.encode("né") == [110, 0xC3, 0xA9] and codec.ends == (0,)
    assert codec.encode("n\udcff") == [110, 0xFF] and shown("né\udcff") == "né\ufffd"
    assert codec.decode([110, 0xC3, 0xA9]) == "né" and codec.decode([110, 300]) == "n\ufffd"


def test_data_of_bytes_says_so_itself(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc")
    given = [str(tmp_path / "text.txt"), "--bytes", "--output", str(tmp_path / "ids")]
    assert prepare_data.main([*given, "--workers", "1"]) == 0
    data = common(source="indexed", blend=["1", str(tmp_path / "ids")])
    assert codec_of(data, 256, None).tokenizer is None


def test_a_tokenizer_and_its_end_of_document(tokenizer: Path, corpus: str) -> None:
    data = common(source="indexed", blend=[corpus])
    for given in (str(tokenizer), str(tokenizer.parent)):
        codec = codec_of(data, 4, given)
        assert codec.encode("b a z") == [2, 1, 3] and codec.ends == (0,)
        assert codec.decode([2, 1]).split() == ["b", "a"]
    with pytest.raises(DataError, match="'a \ufffd' is not UTF-8, which its tokenizer needs"):
        codec.encode("a \udcff")
    assert codec_of(common(source="synthetic"), 4, str(tokenizer)).ends == ()
    assert codec_of(common(source="synthetic"), 4, str(tokenizer), "<end>").ends == (0,)
    base = {"huggingface": {"eos_token_id": [2, 1]}}
    assert codec_of(base, 4, str(tokenizer)).ends == (2, 1)
    own = {"eos_token_id": 1, "generation_config": {"eos_token_id": [2, 1]}}
    assert codec_of({"huggingface": own}, 4, str(tokenizer)).ends == (1, 2)
    beyond = {"huggingface": {"eos_token_id": 1, "pad_token_id": 4}}
    with pytest.raises(DataError, match="pad_token_id=4, and .*=4: .*; give --eod TOKEN"):
        codec_of(beyond, 4, str(tokenizer))
    assert codec_of(beyond, 4, str(tokenizer), "<end>").ends == (0,)


def test_the_tokenizer_is_kept_beside_the_data(tokenizer: Path, corpus: str) -> None:
    codec = codec_of(common(source="indexed", blend=["0.5", corpus]), 4, None)
    assert codec.encode("b a z") == [2, 1, 3] and codec.ends == (0,)


def test_other_tokenizers_are_refused(tokenizer: Path, corpus: str) -> None:
    data = common(source="indexed", blend=[corpus])
    Path(f"{corpus}.tokenizer.json").unlink()
    for given, vocabulary, eod, why in (
        (None, 4, None, "the data was made with tok/tokenizer.json: give --tokenizer FILE"),
        ("bytes", 4, None, "bytes do not fit model.vocab_size=4"),
        ("bytes", 256, "<end>", "--eod is for a tokenizer.json"),
        ("bytes", 256, None, "tokenizer bytes is not that of the data, which is tok/tokenizer"),
        ("none.json", 4, None, "tokenizer none.json does not exist; give --tokenizer"),
        (str(tokenizer), 2, None, r"has ids up to 3 \('\?'\), but model.vocab_size=2"),
        (str(tokenizer), 4, "<pad>", "--eod <pad> is not a token of"),
    ):
        with pytest.raises(DataError, match=why):
            codec_of(data, vocabulary, given, eod)
    with pytest.raises(DataError, match="the data names no tokenizer"):
        codec_of(common(source="synthetic"), 256, None)
    changed = json.loads(tokenizer.read_text())
    changed["model"]["vocab"] |= {"a": 2, "b": 1}
    tokenizer.write_text(json.dumps(changed))
    with pytest.raises(DataError, match="is not that of the data, which is tok/tokenizer.json"):
        codec_of(data, 4, str(tokenizer))


def test_a_pair_of_another_tokenizer_is_refused(tokenizer: Path, corpus: str) -> None:
    described = sidecars({"source": "indexed", "blend": [corpus]})
    check_pair(corpus, described)
    check_pair(str(tokenizer), described)
    check_pair(corpus, [])
    other = replace(described[0], tokenizer="other.json", tokenizer_sha256="0")
    check_pair(corpus, [other])  # of other bytes and the same meaning
    other = replace(other, tokenizer_meaning="0")
    why = "was prepared with the tokenizer tok/tokenizer.json, and the data of the run with other"
    with pytest.raises(DataError, match=why):
        check_pair(corpus, [other])


def test_a_prompt_may_spell_special_tokens(tokenizer: Path, corpus: str) -> None:
    data = common(source="indexed", blend=[corpus])

    def codec(choice: str) -> Codec:
        return codec_of(data, 4, None, special_text=choice)

    text = "a <end> b"
    assert codec("special").encode(text) == [1, 0, 2]
    assert codec("plain").encode(text) == [1, 3, 3, 3, 2], "`<`, `end` and `>` are unknown words"
    assert codec_of(data, 4, None).encode(text) == codec("plain").encode(text)
    with pytest.raises(DataError, match="the special token '<end>' in the text at character 2"):
        codec("error").encode(text)
    assert codec("error").encode("a b") == [1, 2]


def test_a_tokenizer_of_other_bytes_and_the_same_meaning_is_that_of_the_data(
    tokenizer: Path, corpus: str
) -> None:
    """The description of the data says so, or the copy next to data of before."""
    data = common(source="indexed", blend=[corpus])
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()), indent=7))
    assert codec_of(data, 4, str(tokenizer)).encode("b a") == [2, 1]
    description = Path(f"{corpus}.json")
    content = json.loads(description.read_text())
    description.write_text(json.dumps(content | {"tokenizer_meaning": ""}))
    assert codec_of(data, 4, str(tokenizer)).encode("b a") == [2, 1]
    Path(f"{corpus}.tokenizer.json").unlink()
    with pytest.raises(DataError, match="is not that of the data, which is tok/tokenizer.json"):
        codec_of(data, 4, str(tokenizer))
