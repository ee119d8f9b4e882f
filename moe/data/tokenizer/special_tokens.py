"""Special tokens of a model and its generation_config.json, from its data and its tokenizer.

Also checks that a tokenizer belongs to a run's data, by the files next to it, and to the model.
Imports no torch.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.remote_files import beside
from phalanx.moe.data.token_files import BYTES, BYTES_EOD, Sidecar, tokenizer_beside
from phalanx.moe.data.tokenizer.encoder import load_tokenizer, meaning, same_meaning

Ids = dict[str, int | list[int]]
Chosen = Mapping[str, int | list[int] | None]  # None removes an id

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
GENERATION = "generation_config.json"
CHOOSE = "give --{option} an id below {vocab_size}, or none"
_LISTS = ("suppress_tokens", "begin_suppress_tokens")

_SHOWN = 60  # characters of a value in a message
_LARGEST = 256 << 20  # bytes of an index or a configuration


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of an exported folder."""

    ids: Ids  # known ones of `bos_token_id`, `eos_token_id`, `pad_token_id` of config.json
    generation: dict[str, Any]
    """generation_config.json, with the same ids; its `eos_token_id` may list more."""
    notes: tuple[str, ...] = ()  # lines on ids unlike the tokenizer's, and on that of an export

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
    the imported model (`base`, from `imported_tokens`); `chosen` ids override all of these. The
    `remedy` is advice on an id out of range, with fields `option` and `vocab_size`.

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


def check_vocabulary(folder: Path, vocab_size: int, remedy: str) -> None:
    """Check that all tokens of a folder's tokenizer are in the vocabulary; else a DataError."""
    check_of_model(folder, _ids(folder, _settings(folder)), vocab_size, remedy)


def token_ids(config: Mapping[str, Any]) -> Ids:
    """Special tokens of a config.json; a DataError for one that is no id."""
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
    """Check the token ids of config.json or generation_config.json, which messages call `where`.

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
    """A JSON object of a folder, empty if the file is missing; a DataError for other content."""
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


def prefixes(data: Mapping[str, Any]) -> list[str]:
    """Local prefixes of the descriptions (sidecars) of a run's data section."""
    if data.get("source") != "indexed":
        return []
    return [beside(str(entry), str(data.get("cache", ""))) for entry in data.get("blend", [])]


def sidecars(data: Mapping[str, Any]) -> list[Sidecar]:
    """Descriptions of a run's data whose files still exist; a DataError if one cannot be read."""
    paths = [Path(f"{prefix}.json") for prefix in prefixes(data)]
    return [Sidecar.read(path) for path in paths if path.is_file()]


def tokenizer_of_data(data: Mapping[str, Any]) -> Path | str | None:
    """The tokenizer.json that is kept next to a run's data, or `BYTES`; None if neither is known.

    Raises DataError if a description of the data cannot be read.
    """
    if data.get("source") == "embedded" or {s.tokenizer for s in sidecars(data)} == {BYTES}:
        return BYTES
    return next(iter(_kept(data)), None)


def _kept(data: Mapping[str, Any]) -> list[Path]:
    files = (tokenizer_beside(prefix) for prefix in prefixes(data))
    return [file for file in files if file.is_file()]


def tokenizers_of(described: Iterable[Sidecar]) -> str:
    """Tokenizers that descriptions name, as a list for the user; empty without any."""
    return ", ".join(sorted({each.tokenizer for each in described}))


def check_of_data(tokenizer: Path, data: Mapping[str, Any], remedy: str = "") -> None:
    """Check that data was prepared with a tokenizer.json, or with one of the same meaning.

    Data without descriptions passes. Raises DataError, with the `remedy`, for another tokenizer.
    """
    described = sidecars(data)
    sums = {each.tokenizer_sha256 for each in described}
    if not sums or _sha256(tokenizer) in sums:
        return
    meanings = {each.tokenizer_meaning for each in described}
    # Older descriptions have no meaning, but may have the file.
    same = (meanings - {""} and meaning(load_tokenizer(str(tokenizer))) in meanings) or any(
        same_meaning(tokenizer, kept) for kept in _kept(data) if _sha256(kept) in sums
    )
    if not same:
        hint = f": {remedy}" if remedy else ""
        raise DataError(
            f"tokenizer {tokenizer} is not that of the data, which is "
            f"{tokenizers_of(described)}{hint}"
        )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_goes_on(before: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Check that ids of a data section are those that a model of another one was trained on.

    One of the tokenizers may have more tokens. What is not known passes. Raises DataError.
    """
    old, new = (tokenizer_of_data(each) for each in (before, data))
    if None in (old, new) or old == new:
        return
    if BYTES not in (old, new):
        ids, others = (load_tokenizer(str(file)).get_vocab().items() for file in (old, new))
        if ids <= others or others <= ids:
            return
    raise DataError(
        f"the data (data.blend) has the tokenizer {new}, and what the model was trained on has "
        f"{old}, whose ids are other tokens: prepare the text with that one, or with one that adds "
        "tokens to it"
    )


def check_of_model(
    tokenizer: Path, ids: Mapping[str, int], vocab_size: int, remedy: str = ""
) -> None:
    """Check that a model's vocabulary includes all tokens of a tokenizer, which may have fewer.

    Raises DataError, with the `remedy`, for an id outside the vocabulary.
    """
    token = max(ids, key=ids.__getitem__, default="")
    if ids and ids[token] >= vocab_size:
        hint = f": {remedy}" if remedy else ""
        raise DataError(
            f"tokenizer {tokenizer} has ids up to {ids[token]} ({token!r}), but "
            f"model.vocab_size={vocab_size}: it is not that of the model{hint}"
        )
