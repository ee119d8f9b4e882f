"""Secrets do not leave the process: not in logs, saved configurations or tracking services."""

import functools
import os
import re
from typing import Any
from urllib.parse import quote

_SECRET_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|WEBHOOK|CONNECTION_STRING"
    r"|(API|ACCESS|PRIVATE)_?KEY|(KEY|KEY_ID|TOKEN|_PASS|_PWD|_PAT|_AUTH|_SAS)$",
    re.IGNORECASE,
)
_OF_A_PLACE = re.compile(r"_(FILE|PATH|DIR)$", re.IGNORECASE)  # such as AWS_SHARED_CREDENTIALS_FILE
_LONG = 8  # characters; shorter values are found in any text, so that only whole words are replaced
_SHORTEST = 4  # characters; replacing shorter values would blank all text
_FLAGS = {"true", "false", "none", "null"}  # as of HF_HUB_DISABLE_IMPLICIT_TOKEN
# A password may have slashes in it, a user none.
_IN_ADDRESS = re.compile(r"(?<=://)([^/@\s:]*:[^@\s]*|[^/@\s]+)(@[^/@\s]+)*(?=@)")
_IN_QUERY = re.compile(r"([?&;][\w.-]*(?:key|token|secret|passw|signature)[\w.-]*=)[^&;\s]+", re.I)


def redacted[T](value: T) -> T:
    """`value` with `***` for every secret in its texts, in lists and dictionaries as well.

    Secrets are user and password of an address (`scheme://user:password@host`), signed parts of its
    query, and each line of environment variables that are named like keys or passwords. Values
    shorter than 8 characters are replaced as whole words, those shorter than 4 stay.
    """
    return _redacted(value, _any_of(_environment()))


def _redacted(value: Any, secrets: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return _IN_QUERY.sub(r"\1***", _IN_ADDRESS.sub("***", secrets.sub("***", value)))
    if isinstance(value, dict):
        return {key: _redacted(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_redacted(item, secrets) for item in value)
    return value


@functools.lru_cache(maxsize=1)
def _any_of(secrets: frozenset[str]) -> re.Pattern[str]:
    written = secrets | {quote(secret, safe="") for secret in secrets}
    words = [_whole(word) for word in sorted(written, key=len, reverse=True)]
    return re.compile("|".join(words) or r"(?!)")


def _whole(word: str) -> str:
    if len(word) >= _LONG:
        return re.escape(word)
    return rf"(?<![\w/+.~-]){re.escape(word)}(?![\w/+~=-]|\.\w)"


def _is_secret(name: str, value: str) -> bool:
    """The value alone does not tell: a key may begin with `/`, as a path does."""
    if not _SECRET_NAME.search(name) or _OF_A_PLACE.search(name):
        return False
    # By convention GOOGLE_APPLICATION_CREDENTIALS, and others of that name, may be paths.
    return "CREDENTIAL" not in name.upper() or not value.startswith(("/", "~", "."))


def _environment() -> frozenset[str]:
    values = [value for name, value in os.environ.items() if _is_secret(name, value)]
    lines = (line.strip() for value in values for line in value.splitlines())
    return frozenset(s for s in lines if len(s) >= _SHORTEST and s.lower() not in _FLAGS)
