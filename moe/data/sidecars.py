"""Checks that a tokenizer belongs to a run's data, by the files next to it, and to the model.

Shared by import, export, sample.py, evaluate.py and run.sample_every. Imports no torch.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.remote_files import beside
from phalanx.moe.data.token_files import Sidecar


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


def tokenizers_of(described: Iterable[Sidecar]) -> str:
    """Tokenizers that descriptions name, as a list for the user; empty without any."""
    return ", ".join(sorted({each.tokenizer for each in described}))


def check_of_data(tokenizer: Path, described: list[Sidecar], remedy: str = "") -> None:
    """Check that data was prepared with a tokenizer.json.

    Args:
        tokenizer: the file.
        described: descriptions of the data; without any, every tokenizer passes.
        remedy: advice for the user.

    Raises:
        DataError: the data was prepared with another one.
    """
    sums = {each.tokenizer_sha256 for each in described}
    if sums and hashlib.sha256(tokenizer.read_bytes()).hexdigest() not in sums:
        hint = f": {remedy}" if remedy else ""
        raise DataError(
            f"tokenizer {tokenizer} is not that of the data, which is "
            f"{tokenizers_of(described)}{hint}"
        )


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
    if own.tokenizer_sha256 not in {each.tokenizer_sha256 for each in described}:
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
