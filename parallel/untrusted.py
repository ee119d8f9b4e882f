"""Limits on what files from elsewhere may ask of memory: no more than their own bytes.

A file of a few bytes could ask for gigabytes: a pickle names places of a table, which Python's
reader makes as large as the highest of them, and an archive may be compressed. What `pickle` and
`torch.save` write does neither.
"""

import io
import pickletools
import zipfile
from typing import IO

_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}


def check_pickle(data: bytes) -> None:
    """Read a pickle without building anything.

    Raises ValueError if it is damaged, or names a place beyond the number of its opcodes.
    """
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name in _PUTS and int(argument or 0) > number:
            raise ValueError(f"place {argument} of a pickle with fewer objects")


def check_archive(data: bytes | IO[bytes]) -> zipfile.ZipFile:
    """Open an archive of `torch.save`, whose members are as they are in memory.

    Raises:
        ValueError: a member is compressed, or members share bytes.
        zipfile.BadZipFile: it is damaged.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    size = stream.seek(0, io.SEEK_END)
    archive = zipfile.ZipFile(stream)
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"{member.filename[:80]!r} is compressed")
    if sum(member.file_size for member in archive.infolist()) > size:
        raise ValueError("members share bytes")
    return archive
