"""Ids of the special tokens of a model that is exported: what its data, tokenizer or base knows."""

from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.remote_files import beside
from phalanx.moe.data.token_files import BYTES_EOD, Sidecar
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.config import TOKENS, besides
from phalanx.moe.hf.source import read_json

Ids = dict[str, int | list[int]]


def special_tokens(data: dict[str, Any], tokenizer: Path | None, base: Ids, vocab_size: int) -> Ids:
    """`bos_token_id`, `eos_token_id` and `pad_token_id`, as far as they are known.

    The token that ended documents in training comes first, then the tokenizer's, then those of the
    model that was imported.

    Args:
        data: the data section of the run's configuration.
        tokenizer: folder with the tokenizer's files.
        base: what the imported model had.
        vocab_size: that all ids must be below.

    Raises:
        ConversionError: an id is outside the vocabulary, or a file cannot be read.
    """
    sources = [
        ("the data", _of_data(data)),
        (str(tokenizer), _of_tokenizer(tokenizer) if tokenizer else {}),
        ("the imported model", {name: ids for name, ids in base.items() if name in TOKENS}),
    ]
    found: Ids = {}
    for where, known in sources:
        for name, ids in known.items():
            if max(ids if isinstance(ids, list) else [ids]) >= vocab_size:
                raise ConversionError(
                    f"{where} has {name}={ids}, and model.vocab_size={vocab_size}: not of one model"
                )
            found.setdefault(name, ids)
    return found


def _of_data(data: dict[str, Any]) -> Ids:
    """The token after each document; nothing where the files are gone, or are not of one mind."""
    if data.get("source") == "embedded":
        return {"eos_token_id": BYTES_EOD}
    ends = set()
    for entry in data.get("blend", []) if data.get("source") == "indexed" else []:
        path = Path(f"{beside(str(entry), str(data.get('cache', '')))}.json")
        if path.is_file():
            try:
                ends.add(Sidecar.read(path).eod)
            except DataError as error:
                raise ConversionError(str(error)) from None
    return {"eos_token_id": ends.pop()} if len(ends) == 1 else {}


def _of_tokenizer(folder: Path) -> Ids:
    settings = _object(folder / "special_tokens_map.json") | _object(
        folder / "tokenizer_config.json"
    )
    ids = _ids(folder, settings)
    found: Ids = {}
    for name in TOKENS:
        token = settings.get(name.removesuffix("_id"))
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in ids:
            found[name] = ids[text]
    beside = _object(folder / "config.json")  # of the model that the tokenizer came with
    return {name: i for name, i in besides(beside).items() if name in TOKENS} | found


def _ids(folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Added tokens, among which the special ones are; else the whole vocabulary."""
    whole = _object(folder / "tokenizer.json")
    try:
        added = settings.get("added_tokens_decoder", {})
        ids = {token["content"]: int(i) for i, token in added.items()}
        ids |= {token["content"]: int(token["id"]) for token in whole.get("added_tokens", [])}
        words = whole.get("model", {}).get("vocab", {})
        return (words if isinstance(words, dict) else {}) | ids
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConversionError(f"{folder} has tokenizer files that cannot be read") from None


def _object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
