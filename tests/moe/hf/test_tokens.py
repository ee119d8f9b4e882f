"""Special tokens of an exported model: of data, tokenizer, and the model it started from."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.moe.data.token_files import BYTES_EOD, Sidecar
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.tokens import special_tokens

INDEXED = {"source": "indexed"}


def corpus(prefix: Path, eod: int) -> str:
    sidecar = Sidecar("t/tokenizer.json", "", 100, eod, "uint16", documents=1, tokens=1)
    sidecar.write(Path(f"{prefix}.json"))
    return str(prefix)


def tokenizer(folder: Path, **files: Any) -> Path:
    """A folder of JSON files, by name without the ending."""
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


NAMES = {"bos_token": None, "eos_token": "<e>", "pad_token": {"content": "<p>", "lstrip": False}}
ADDED = {"added_tokens": [{"id": 40, "content": "<e>"}], "model": {"vocab": {"<p>": 2, "<e>": 1}}}


def test_data_comes_before_the_tokenizer_and_that_before_the_base(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "t", tokenizer_config=NAMES, tokenizer=ADDED)
    base: Any = {"bos_token_id": 5, "eos_token_id": [6, 7], "max_position_embeddings": 8}
    data = INDEXED | {"blend": ["0.3", corpus(tmp_path / "a", 9), "0.7", str(tmp_path / "gone")]}
    assert special_tokens({}, None, {}, 100) == {}
    assert special_tokens({}, None, base, 100) == {"bos_token_id": 5, "eos_token_id": [6, 7]}
    of_tokenizer = {"eos_token_id": 40, "pad_token_id": 2}
    assert special_tokens({}, folder, {}, 100) == of_tokenizer
    assert special_tokens({}, folder, base, 100) == of_tokenizer | {"bos_token_id": 5}
    assert special_tokens(data, folder, base, 100) == {
        "eos_token_id": 9,
        "pad_token_id": 2,
        "bos_token_id": 5,
    }


def test_what_data_knows(tmp_path: Path) -> None:
    one, two = corpus(tmp_path / "one", 1), corpus(tmp_path / "two", 2)
    assert special_tokens({"source": "embedded"}, None, {}, 256) == {"eos_token_id": BYTES_EOD}
    assert special_tokens({"source": "synthetic", "blend": [one]}, None, {}, 256) == {}
    assert special_tokens(INDEXED | {"blend": [one]}, None, {}, 256) == {"eos_token_id": 1}
    assert special_tokens(INDEXED | {"blend": [one, two]}, None, {}, 256) == {}


def test_other_places_of_a_tokenizer(tmp_path: Path) -> None:
    decoder = {"bos_token": "<b>", "added_tokens_decoder": {"77": {"content": "<b>"}}}
    folder = tokenizer(tmp_path / "decoder", tokenizer_config=decoder)
    assert special_tokens({}, folder, {}, 100) == {"bos_token_id": 77}
    mapped = tokenizer(tmp_path / "map", special_tokens_map=NAMES, tokenizer=ADDED)
    assert special_tokens({}, mapped, {}, 100) == {"eos_token_id": 40, "pad_token_id": 2}
    of_model = {"eos_token_id": 11, "pad_token_id": None, "vocab_size": 100}
    beside = tokenizer(tmp_path / "beside", tokenizer_config={}, config=of_model)
    assert special_tokens({}, beside, {}, 100) == {"eos_token_id": 11}


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "t", tokenizer_config=NAMES, tokenizer=ADDED)
    with pytest.raises(ConversionError, match="eos_token_id=40, and model.vocab_size=40"):
        special_tokens({}, folder, {}, 40)
    broken = tokenizer(tmp_path / "broken", tokenizer_config=NAMES, tokenizer={"added_tokens": [1]})
    with pytest.raises(ConversionError, match="broken has tokenizer files that cannot be read"):
        special_tokens({}, broken, {}, 40)
