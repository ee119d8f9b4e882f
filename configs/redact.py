"""Secrets do not leave the process: not in logs, saved configurations or tracking services."""

import os
import re
from typing import Any

_SECRET_NAME = re.compile(r"(KEY|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_SHORTEST = 8  # characters; shorter values are found in any text
# A password may have slashes in it, a user none.
_IN_ADDRESS = re.compile(r"(?<=://)([^/@\s:]*:[^@\s]*|[^/@\s]+)(?=@)")
_IN_QUERY = re.compile(r"([?&;][\w.-]*(?:key|token|secret|passw|signature)[\w.-]*=)[^&;\s]+", re.I)


def redacted[T](value: T) -> T:
    """`value` with `***` for every secret in its texts, in lists and dictionaries as well.

    Secrets are user and password of an address (`scheme://user:password@host`), signed parts of
    its query, and the values of environment variables that are named like keys or passwords.
    """
    return _redacted(value, _environment())


def _redacted(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
        return _IN_QUERY.sub(r"\1***", _IN_ADDRESS.sub("***", value))
    if isinstance(value, dict):
        return {key: _redacted(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_redacted(item, secrets) for item in value)
    return value


def _environment() -> list[str]:
    named = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    paths = ("/", "~", ".")  # of a file with the secret in it
    found = [v for v in named if len(v) >= _SHORTEST and not v.startswith(paths)]
    return sorted(found, key=len, reverse=True)
