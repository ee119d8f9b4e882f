"""Addresses of object stores (`s3://bucket/prefix`) where a knob may also name a folder."""

import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OF_THIS_MACHINE = ("file", "local")


def is_address(text: str) -> bool:
    """Return whether a text is an address rather than a path of a file system."""
    return _ADDRESS.match(text.strip()) is not None


def flaw(text: str) -> tuple[str, str] | None:
    """(what is wrong with an address, one that could be meant), or None."""
    scheme, _, rest = text.strip().partition("://")
    if scheme.lower() in _OF_THIS_MACHINE:
        return "is a file of this machine, which is written without a scheme", rest or "/"
    who, at, place = rest.rpartition("@")
    if at and "/" not in who.partition(":")[0]:
        reason = "has a user or password in it; credentials belong into the environment"
        return reason, f"{scheme}://{place}"
    if cut := re.search(r"[?#\s]|[^\x20-\x7e]", rest):
        reason = "has what no address of an object may have: ? # spaces, other than ASCII"
        return reason, f"{scheme}://{rest[: cut.start()].strip('/') or 'bucket/prefix'}"
    if not rest.strip("/") or (rest.startswith("/") and scheme.lower() != "memory"):
        return "names no bucket", f"{scheme}://bucket/{rest.strip('/') or 'prefix'}"
    parts = rest.strip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        plain = "/".join(part for part in parts if part not in ("", ".", ".."))
        return "has an empty part, . or ..", f"{scheme}://{plain or 'bucket/prefix'}"
    return None
