"""Rows of a .wandb file, which W&B writes in blocks of 32 KiB: a kill loses those of the last one.

The file is a log of LevelDB (doc/log_format.md there) behind seven bytes: blocks with chunks of
records, which are wandb's protobuf messages.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 << 10
_PREAMBLE = 7
_HEAD = struct.Struct("<IHB")  # checksum, size and kind of a chunk
_WHOLE, _LAST = 1, 4  # kinds of chunks that end a record; 2 begins one, 3 goes on


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows that were logged, in their order, up to where the file breaks off."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(path.read_bytes()):
        record = Record.FromString(content)
        if record.HasField("history"):
            yield {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }


def _records(data: bytes) -> Iterator[bytes]:
    at, record = _PREAMBLE, b""
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:  # too little for another chunk
            at += left
            continue
        _, size, kind = _HEAD.unpack_from(data, at)
        begin, at = at + _HEAD.size, at + _HEAD.size + size
        if not kind or at > len(data):
            return
        record = (b"" if kind in (_WHOLE, 2) else record) + data[begin:at]
        if kind in (_WHOLE, _LAST):
            yield record
