"""Special tokens of a model and its generation_config.json, from its data and its tokenizer.

Export, sample.py and evaluate.py share these checks: an id is below the size of the vocabulary, a
tokenizer is that of the model, and config.json and generation_config.json agree.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.sidecars import check_of_data, check_of_model, sidecars
from phalanx.moe.data.token_files import BYTES_EOD

Ids = dict[str, int | list[int]]
Chosen = Mapping[str, int | list[int] | None]
"""Ids that a user sets in place of the known ones; None removes one."""

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
GENERATION = "generation_config.json"
CHOOSE = "give --{option} an id below {vocab_size}, or none"
"""Advice of the converter on an id out of range."""
_LISTS = ("suppress_tokens", "begin_suppress_tokens")

_SHOWN = 60  # characters of a value in a message
_LARGEST = 256 << 20  # bytes of an index or a configuration


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of an exported folder."""

    ids: Ids  # known ones of `bos_token_id`, `eos_token_id`, `pad_token_id` of config.json
    generation: dict[str, Any]
    """generation_config.json: the same ids, and all other fields of the model's file. Its
    `eos_token_id` may list more ids at which a text ends."""
    notes: tuple[str, ...] = ()
    """Lines on ids that differ from those of the tokenizer, and on the tokenizer of an export."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids at which a text ends, the one of training first."""
        several = self.ids.get("eos_token_id", []), self.generation.get("eos_token_id")
        return tuple(dict.fromkeys(i for ids in several for i in _list(ids)))


def special_tokens(
    data: dict[str, Any],
    tokenizer: Path | None,
    base: dict[str, Any],
    vocab_size: int,
    chosen: Chosen | None = None,
    remedy: str = CHOOSE,
) -> SpecialTokens:
    """Known special tokens of a model.

    The token that ended documents in training has priority, then the tokenizer's, then those of
    the imported model.

    Args:
        data: the data section of the run's configuration.
        tokenizer: folder with the tokenizer's files.
        base: result of `imported_tokens` for an imported model.
        vocab_size: upper bound of the ids.
        chosen: ids that override all of these.
        remedy: advice on an id out of range, with fields `option` and `vocab_size`.

    Raises:
        DataError: an id is outside the vocabulary, or a file cannot be read.
    """
    chosen = chosen or {}
    of_tokenizer = _of_tokenizer(tokenizer) if tokenizer else {}
    ids = {name: each for name, each in chosen.items() if each is not None}
    check_ids("the command line", ids, vocab_size, remedy)
    for where, known in (
        ("the data", _of_data(data)),
        (str(tokenizer), of_tokenizer),
        ("the imported model", {name: base[name] for name in TOKENS if name in base}),
    ):
        known = {name: each for name, each in known.items() if name not in chosen}
        check_ids(where, known, vocab_size, remedy)
        ids = known | ids
    notes = (
        f"{name}={ids[name]}; {tokenizer} has {of_tokenizer[name]}"
        for name in TOKENS
        if name in of_tokenizer and name in ids and ids[name] != of_tokenizer[name]
    )
    source, where = base.get("generation_config"), "the imported model's generation_config.json"
    if not isinstance(source, dict):
        path = tokenizer / GENERATION if tokenizer else None
        source, where = json_object(path) if path else {}, str(path)
    generation = {n: v for n, v in source.items() if n not in chosen}
    check_ids(where, generation, vocab_size, remedy)
    for name, each in ids.items():
        present = _list(generation.get(name))
        if name != "eos_token_id" or not set(_list(each)) <= set(present):
            generation[name] = each
    return SpecialTokens(ids, generation, tuple(notes))


def check_tokenizer(folder: Path, data: dict[str, Any], vocab_size: int) -> None:
    """Check that a folder's tokenizer is that of a run's data and model.

    Raises:
        DataError: it is not, or cannot be read.
    """
    remedy = "leave --tokenizer out to export that of the data"
    if (file := folder / "tokenizer.json").is_file():
        check_of_data(file, data, remedy)
    check_vocabulary(folder, vocab_size, remedy)


def check_vocabulary(folder: Path, vocab_size: int, remedy: str) -> None:
    """Check that all tokens of a folder's tokenizer are in the vocabulary.

    Raises:
        DataError: one is not; or a file cannot be read.
    """
    check_of_model(folder, _ids(folder, _settings(folder)), vocab_size, remedy)


def token_ids(config: Mapping[str, Any]) -> Ids:
    """Special tokens of a config.json.

    Raises:
        DataError: a token is no id.
    """
    known: Ids = {}
    for name in TOKENS:
        ids = config.get(name)
        each = ids if isinstance(ids, list) else [ids]
        if ids is not None and not all(type(i) is int and i >= 0 for i in each):
            raise DataError(f"config.json has {name}={shown(ids)}; expected an id")
        if ids is not None and ids != []:
            known[name] = ids
    return known


def check_ids(where: str, values: Mapping[str, Any], vocab_size: int, remedy: str = CHOOSE) -> None:
    """Check the token ids of config.json or generation_config.json.

    Args:
        where: name of the file in messages.
        values: its fields; only ids are checked.
        vocab_size: of the model.
        remedy: as for `special_tokens`.

    Raises:
        DataError: an id is outside the vocabulary, or not an id.
    """
    for name, ids in values.items():
        if ids is None or not (name.endswith("_token_id") or name in _LISTS):
            continue
        if not all(type(i) is int and 0 <= i < vocab_size for i in _list(ids)):
            hint = f"correct it in {where}"
            if name in TOKENS:
                hint = remedy.format(option=name.replace("_", "-"), vocab_size=vocab_size)
            raise DataError(
                f"{where} has {name}={shown(ids)}, and model.vocab_size={vocab_size}: the model "
                f"has no such token; {hint}"
            )


def _list(ids: Any) -> list[Any]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _of_data(data: dict[str, Any]) -> Ids:
    """The token after each document; empty if the files are gone, or disagree."""
    if data.get("source") == "embedded":
        return {"eos_token_id": BYTES_EOD}
    ends = {sidecar.eod for sidecar in sidecars(data)}
    return {"eos_token_id": ends.pop()} if len(ends) == 1 else {}


def _of_tokenizer(folder: Path) -> Ids:
    settings = _settings(folder)
    ids = _ids(folder, settings)
    special: Ids = {}
    for name in TOKENS:
        token = settings.get(name.removesuffix("_id"))
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in ids:
            special[name] = ids[text]
    config = json_object(folder / "config.json")  # of the model that the tokenizer came with
    return token_ids(config) | special


def _settings(folder: Path) -> dict[str, Any]:
    of_special, of_all = "special_tokens_map.json", "tokenizer_config.json"
    return json_object(folder / of_special) | json_object(folder / of_all)


def _ids(folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Ids of all tokens in the files of a tokenizer; added tokens have priority."""
    tokenizer = json_object(folder / "tokenizer.json")
    try:
        words = tokenizer.get("model", {}).get("vocab") or json_object(folder / "vocab.json")
        if isinstance(words, list):  # a unigram model has pieces and their scores
            words = {piece: i for i, (piece, _) in enumerate(words)}
        added = settings.get("added_tokens_decoder", {})
        ids = words | json_object(folder / "added_tokens.json")
        ids |= {token["content"]: int(i) for i, token in added.items()}
        ids |= {token["content"]: int(token["id"]) for token in tokenizer.get("added_tokens", [])}
        return {str(token): int(i) for token, i in ids.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(f"{folder} has tokenizer files that cannot be read") from None


def json_object(path: Path) -> dict[str, Any]:
    """A JSON object of a folder; empty if the file is missing.

    Raises:
        DataError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except ValueError as error:
        raise DataError(str(error)) from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it is no JSON object, or larger than any index or configuration.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is no JSON object") from None
    return data


def shown(value: Any) -> str:
    """A value as text of limited length, for messages."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
