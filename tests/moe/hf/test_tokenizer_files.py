"""The tokenizer of an exported folder, as AutoTokenizer of transformers opens it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer

from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.tokenizer_files import (
    check_tokenizer,
    files_of_data,
    files_of_folder,
    special_tokens,
)
from phalanx.scripts import prepare_data
from tests.moe.data.tokenizer.test_encoder import byte_level, unigram
from tests.scripts.test_prepare_data import documents
from tests.support.tokenizers import llama

TEXTS = ["bye bye </s> x", "abc <s>", " a  b\n<0x00>\u0100", "é"]


def prepared(folder: Path, *how: str) -> dict[str, Any]:
    """Section `data` of a run on texts that prepare_data encodes."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "texts.jsonl").write_text(rows)
    given = [str(folder / "texts.jsonl"), "--output", str(folder / "ids"), "--workers", "1"]
    assert prepare_data.main([*given, *how]) == 0
    return {"source": "indexed", "blend": [str(folder / "ids")]}


def of_tokenizer(folder: Path, made: Tokenizer) -> dict[str, Any]:
    (folder / "t").mkdir()
    made.save(str(folder / "t" / "tokenizer.json"))
    return prepared(folder, "--tokenizer", str(folder / "t"), "--eod", "</s>")


def exported(folder: Path, data: dict[str, Any], family: str = "qwen3_moe") -> Any:
    """AutoTokenizer of the files of an export."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    ids = special_tokens(data, None, {}, 1000).ids
    (out / "config.json").write_text(json.dumps({"model_type": family} | ids))
    files_of_data(data, 1000).write(out, ids, 4096)
    return AutoTokenizer.from_pretrained(out)


def encoded(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(text, split_special_tokens=True).input_ids for text in TEXTS]


def with_template(made: Tokenizer) -> Tokenizer:
    """Llama's, which begins a text with `<s>`; prepare_data does not."""
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(2)
    made.enable_padding(length=9, pad_id=0, pad_token="<unk>")
    return made


@pytest.mark.parametrize("made", [byte_level(), llama(), unigram(), with_template(llama())])
def test_ids_are_those_of_the_data(tmp_path: Path, made: Tokenizer) -> None:
    pad = made.padding["pad_token"] if made.padding else "</s>"
    opened = exported(tmp_path, of_tokenizer(tmp_path, made))
    end = made.token_to_id("</s>")
    assert (opened.eos_token, opened.eos_token_id) == ("</s>", end)
    assert (opened.pad_token, opened.bos_token) == (pad, None)
    assert opened.model_max_length == 4096
    rows = [row.tolist() for row in documents(tmp_path / "ids")]
    # Unigram's model takes special tokens apart in prepare_data alone.
    first = 2 if isinstance(made.model, models.Unigram) else 0
    assert [[*ids, end] for ids in encoded(opened)][first:] == rows[first:]
    assert opened("abc</s>").input_ids.count(end) == 1


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "glm4_moe", "gpt_oss", "llama", "mixtral", "olmoe", "qwen3", "qwen3_next"],
)
def test_every_family_opens_it(tmp_path: Path, family: str) -> None:
    """Classes of some build other tokenizers than their file describes."""
    opened = exported(tmp_path, of_tokenizer(tmp_path, llama()), family)
    rows = [row.tolist() for row in documents(tmp_path / "ids")]
    assert [[*ids, 2] for ids in encoded(opened)] == rows


def test_data_of_bytes_has_a_tokenizer_too(tmp_path: Path) -> None:
    for data in (prepared(tmp_path, "--bytes"), {"source": "embedded"}):
        opened = exported(tmp_path, data)
        assert (opened.eos_token_id, opened.pad_token_id, len(opened)) == (0, 0, 256)
        assert encoded(opened) == [list(text.encode()) for text in TEXTS]
        assert [opened.decode(ids) for ids in encoded(opened)] == TEXTS
    assert files_of_data({"source": "embedded"}, 255).tokenizer is None


def test_saved_by_transformers_it_is_still_that_of_the_data(tmp_path: Path) -> None:
    data = of_tokenizer(tmp_path, llama())
    exported(tmp_path, data).save_pretrained(tmp_path / "saved")
    saved = tmp_path / "saved" / "tokenizer.json"
    assert saved.read_bytes() != (tmp_path / "t" / "tokenizer.json").read_bytes()
    check_tokenizer(tmp_path / "saved", data, 1000)
    content = json.loads(saved.read_text())
    content["model"]["merges"].reverse()
    saved.write_text(json.dumps(content))
    with pytest.raises(ConversionError, match="is not that of the data, which is t/tokenizer.json"):
        check_tokenizer(tmp_path / "saved", data, 1000)


def test_a_folder_with_the_file_alone_opens_too(tmp_path: Path) -> None:
    data = of_tokenizer(tmp_path, llama())
    out = tmp_path / "out"
    out.mkdir()
    ids = special_tokens(data, tmp_path / "t", {"bos_token_id": 1}, 1000).ids
    files_of_folder(tmp_path / "t").write(out, ids, 64)
    copied = tmp_path / "t" / "tokenizer.json"
    assert (out / "tokenizer.json").read_bytes() == copied.read_bytes()
    opened = AutoTokenizer.from_pretrained(out)
    assert (opened.bos_token, opened.eos_token, opened.pad_token) == ("<s>", "</s>", "</s>")
    (tmp_path / "t" / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    files_of_folder(tmp_path / "t").write(out, ids, 64)
    assert (out / "tokenizer_config.json").read_text() == '{"eos_token": "<s>"}'


def test_without_a_tokenizer_one_line_says_why(tmp_path: Path) -> None:
    data = of_tokenizer(tmp_path, llama())
    kept = tmp_path / "ids.tokenizer.json"
    assert files_of_data(data, 1000).note == f"tokenizer: that of the data, {kept}"
    for state, why in (
        ("changed", f"tokenizer {kept} is not that of the data, which is t/tokenizer.json"),
        ("gone", "that of the data, t/tokenizer.json, is not kept next to it"),
    ):
        if state == "changed":
            byte_level().save(str(kept))
        else:
            kept.unlink()
        found = files_of_data(data, 1000)
        assert found.note == f"no tokenizer: {why}; give --tokenizer FOLDER to export one"
        found.write(tmp_path, {"eos_token_id": 2}, 64)
        assert not (tmp_path / "tokenizer_config.json").exists()
    note = files_of_data({"source": "synthetic"}, 1000).note
    assert note.startswith("no tokenizer: the data names none, or is not here; give --tok")
