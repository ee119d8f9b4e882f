"""Checks that a tokenizer belongs to a run's data, by the files next to it, and to the model.

Shared by import, export, sample.py, evaluate.py and run.sample_every. Imports no torch.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.remote_files import beside
from phalanx.moe.data.token_files import BYTES, Sidecar, tokenizer_beside
from phalanx.moe.data.tokenizer.files import load_tokenizer, meaning, same_meaning


def prefixes(data: Mapping[str, Any]) -> list[str]:
    """Local prefixes of the descriptions (sidecars) of a run's data.

    Args:
        data: the data section of its configuration.
    """
    if data.get("source") != "indexed":
        return []
    return [beside(str(entry), str(data.get("cache", ""))) for entry in data.get("blend", [])]


def sidecars(data: Mapping[str, Any]) -> list[Sidecar]:
    """Descriptions of a run's data whose files still exist.

    Raises:
        DataError: one cannot be read.
    """
    paths = [Path(f"{prefix}.json") for prefix in prefixes(data)]
    return [Sidecar.read(path) for path in paths if path.is_file()]


def tokenizer_of_data(data: Mapping[str, Any]) -> Path | str | None:
    """The tokenizer.json that is kept next to a run's data, or `BYTES`; None if neither is known.

    Args:
        data: the data section of its configuration.

    Raises:
        DataError: a description of the data cannot be read.
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

    Args:
        tokenizer: the file.
        data: the data section of a configuration; without descriptions every tokenizer passes.
        remedy: advice for the user.

    Raises:
        DataError: the data was prepared with another one.
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


def check_pair(prefix: str, described: list[Sidecar]) -> None:
    """Check that a .bin/.idx pair was prepared with the tokenizer of a run's data.

    Args:
        prefix: local; one without a description passes, and so does what is no pair.
        described: descriptions of the data; without any, every pair passes.

    Raises:
        DataError: it was prepared with another one.
    """
    path = Path(f"{Path(prefix).expanduser()}.json")
    if not (described and path.is_file() and path.with_suffix(".idx").is_file()):
        return
    own = Sidecar.read(path)
    if not any(own.same_tokenizer(each) for each in described):
        raise DataError(
            f"{prefix} was prepared with the tokenizer {own.tokenizer}, and the data of the run "
            f"with {tokenizers_of(described)}: prepare its text with that one"
        )


def check_of_model(
    tokenizer: Path, ids: Mapping[str, int], vocab_size: int, remedy: str = ""
) -> None:
    """Check that a model's vocabulary includes all tokens of a tokenizer.

    Args:
        tokenizer: its file or folder.
        ids: of its tokens; it may have fewer than the model.
        vocab_size: of the model.
        remedy: advice for the user.

    Raises:
        DataError: an id is outside the vocabulary.
    """
    token = max(ids, key=ids.__getitem__, default="")
    if ids and ids[token] >= vocab_size:
        hint = f": {remedy}" if remedy else ""
        raise DataError(
            f"tokenizer {tokenizer} has ids up to {ids[token]} ({token!r}), but "
            f"model.vocab_size={vocab_size}: it is not that of the model{hint}"
        )
