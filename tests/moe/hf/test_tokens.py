"""Special tokens: of data, tokenizer, and the model that a run started from; what no model has."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.moe.data.token_files import BYTES_EOD, Sidecar
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.tokenizer_files import check_ids, check_tokenizer, special_tokens

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
    assert special_tokens({}, None, {}, 100).ids == {}
    assert special_tokens({}, None, base, 100).ids == {"bos_token_id": 5, "eos_token_id": [6, 7]}
    of_tokenizer = {"eos_token_id": 40, "pad_token_id": 2}
    assert special_tokens({}, folder, {}, 100).ids == of_tokenizer
    assert special_tokens({}, folder, base, 100).ids == of_tokenizer | {"bos_token_id": 5}
    assert special_tokens(data, folder, base, 100).ids == {
        "eos_token_id": 9,
        "pad_token_id": 2,
        "bos_token_id": 5,
    }


def test_what_data_knows(tmp_path: Path) -> None:
    one, two = corpus(tmp_path / "one", 1), corpus(tmp_path / "two", 2)
    assert special_tokens({"source": "embedded"}, None, {}, 256).ids == {"eos_token_id": BYTES_EOD}
    assert special_tokens({"source": "synthetic", "blend": [one]}, None, {}, 256).ids == {}
    assert special_tokens(INDEXED | {"blend": [one]}, None, {}, 256).ids == {"eos_token_id": 1}
    assert special_tokens(INDEXED | {"blend": [one, two]}, None, {}, 256).ids == {}


def test_other_places_of_a_tokenizer(tmp_path: Path) -> None:
    decoder = {"bos_token": "<b>", "added_tokens_decoder": {"77": {"content": "<b>"}}}
    folder = tokenizer(tmp_path / "decoder", tokenizer_config=decoder)
    assert special_tokens({}, folder, {}, 100).ids == {"bos_token_id": 77}
    mapped = tokenizer(tmp_path / "map", special_tokens_map=NAMES, tokenizer=ADDED)
    assert special_tokens({}, mapped, {}, 100).ids == {"eos_token_id": 40, "pad_token_id": 2}
    of_model = {"eos_token_id": 11, "pad_token_id": None, "vocab_size": 100}
    beside = tokenizer(tmp_path / "beside", tokenizer_config={}, config=of_model)
    assert special_tokens({}, beside, {}, 100).ids == {"eos_token_id": 11}


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "t", tokenizer_config=NAMES, tokenizer=ADDED)
    with pytest.raises(ConversionError, match="eos_token_id=40, and model.vocab_size=40"):
        special_tokens({}, folder, {}, 40)
    assert special_tokens({}, folder, {}, 40, {"eos_token_id": None}).ids == {"pad_token_id": 2}
    broken = tokenizer(tmp_path / "broken", tokenizer_config=NAMES, tokenizer={"added_tokens": [1]})
    with pytest.raises(ConversionError, match="broken has tokenizer files that cannot be read"):
        special_tokens({}, broken, {}, 40)


def test_generation_keeps_its_own_settings_and_the_ids_of_the_model(tmp_path: Path) -> None:
    """The imported model has priority over the tokenizer; a list of ends with its id stays."""
    own = {"eos_token_id": [6, 7], "pad_token_id": 3, "temperature": 0.6, "do_sample": True}
    base = {"eos_token_id": 7, "bos_token_id": 5, "generation_config": own}
    theirs = {"eos_token_id": 40, "top_p": 0.5}
    folder = tokenizer(tmp_path / "t", tokenizer_config={}, generation_config=theirs)
    found = special_tokens({}, folder, base, 100)
    assert found.ids == {"eos_token_id": 7, "bos_token_id": 5} and found.ends == (7, 6)
    assert found.generation == own | {"bos_token_id": 5}
    data = INDEXED | {"blend": [corpus(tmp_path / "a", 9)]}
    found = special_tokens(data, folder, base, 100)
    assert found.generation == own | {"bos_token_id": 5, "eos_token_id": 9} and found.ends == (9,)
    found = special_tokens({}, folder, {"eos_token_id": 7}, 100)
    assert found.generation == {"eos_token_id": 7, "top_p": 0.5}
    found = special_tokens({}, folder, base, 100, {"eos_token_id": None, "pad_token_id": 1})
    assert found.ids == {"bos_token_id": 5, "pad_token_id": 1} and found.ends == ()
    assert found.generation == {
        **{"temperature": 0.6, "do_sample": True},
        **{"bos_token_id": 5, "pad_token_id": 1},
    }


def test_ids_that_a_tokenizer_has_and_that_are_others_are_reported(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "t", tokenizer_config=NAMES, tokenizer=ADDED)
    data = INDEXED | {"blend": [corpus(tmp_path / "a", 9)]}
    assert special_tokens({}, folder, {}, 100).notes == ()
    assert special_tokens(data, folder, {}, 100).notes == (f"eos_token_id=9; {folder} has 40",)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"pad_token_id": 100}, "has pad_token_id=100, .*no such token; give --pad-token-id an id"),
    ({"eos_token_id": [1, 100]}, r"has eos_token_id=\[1, 100\], .*give --eos-token-id an id below"),
    ({"eos_token_id": -1}, "has eos_token_id=-1, and model.vocab_size=100"),
    ({"bos_token_id": True}, "has bos_token_id=True, and"),
    ({"decoder_start_token_id": 100}, "has decoder_start_token_id=100, .*; correct it in x"),
    ({"suppress_tokens": [100]}, r"has suppress_tokens=\[100\], .*; correct it in x"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_ids_that_no_token_has(values: dict[str, Any], message: str) -> None:
    check_ids("x", {"max_new_tokens": 5000, "pad_token_id": None, "suppress_tokens": [99]}, 100)
    with pytest.raises(ConversionError, match=f"^x {message}") as error:
        check_ids("x", values, 100)
    assert "\n" not in str(error.value)


def test_all_files_of_a_tokenizer_are_compared_with_the_vocabulary(tmp_path: Path) -> None:
    unigram = {"model": {"vocab": [[f"t{i}", -1.0] for i in range(9)]}}
    for name, files in (
        ("wordlevel", {"tokenizer": {"model": {"vocab": {"a": 0, "t8": 8}}}}),
        ("unigram", {"tokenizer": unigram}),
        ("added", {"tokenizer": {"added_tokens": [{"id": 8, "content": "t8"}]}}),
        ("slow", {"vocab": {"a": 0, "t8": 8}}),
        ("more", {"vocab": {"a": 0}, "added_tokens": {"t8": 8}}),
        ("decoder", {"tokenizer_config": {"added_tokens_decoder": {"8": {"content": "t8"}}}}),
    ):
        folder = tokenizer(tmp_path / name, **files)
        check_tokenizer(folder, {}, 9)
        with pytest.raises(ConversionError, match=r"ids up to 8 \('t8'\), but .*=8: .* leave"):
            check_tokenizer(folder, {}, 8)


def test_a_tokenizer_that_is_not_that_of_the_data(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "t", tokenizer=ADDED)
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    for name, known in (("same", digest), ("other", "0")):
        sidecar = Sidecar("o/tokenizer.json", known, 100, 1, "uint16", documents=1, tokens=1)
        sidecar.write(tmp_path / f"{name}.json")
    check_tokenizer(folder, INDEXED | {"blend": [str(tmp_path / "same")]}, 100)
    with pytest.raises(
        ConversionError, match="not that of the data, which is o/tok.*: leave --tok"
    ):
        check_tokenizer(folder, INDEXED | {"blend": [str(tmp_path / "other")]}, 100)
