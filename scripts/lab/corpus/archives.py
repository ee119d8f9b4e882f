"""Files inside packages: wheels, source distributions, Debian packages, archives inside of them."""

import gzip
import io
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

Member = tuple[str, bytes]  # name with folders, and content

_TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
_ZIPS = (".whl", ".zip")
_GZIPPED = (".gz", ".dz")


def members(path: Path) -> Iterator[Member]:
    """Regular files of a package, with those of tar archives inside of it, in the archive's order.

    Gzipped files come with their content; names keep the ending. Raises ValueError for an unknown
    ending.
    """
    name = path.name
    if name.endswith(".deb"):
        yield from _deb(path)
    elif name.endswith(_TARS):
        with tarfile.open(path) as archive:
            yield from _tar(archive)
    elif name.endswith(_ZIPS):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield info.filename, archive.read(info)
    else:
        endings = ", ".join((".deb", *_TARS, *_ZIPS))
        raise ValueError(f"{path} is none of {endings}")


def _deb(path: Path) -> Iterator[Member]:
    """Files of a Debian package: dpkg-deb knows how it is compressed."""
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        yield from _tar(archive)
    if process.returncode:
        raise ValueError(f"dpkg-deb cannot read {path}: download it again")


def _tar(archive: tarfile.TarFile) -> Iterator[Member]:
    for info in archive:
        content = archive.extractfile(info) if info.isfile() else None
        if content is None:
            continue
        if info.name.endswith(_TARS):
            with tarfile.open(fileobj=content, mode="r|*") as inner:
                yield from _tar(inner)
        elif info.name.endswith(_GZIPPED):
            yield info.name, gzip.GzipFile(fileobj=io.BytesIO(content.read())).read()
        else:
            yield info.name, content.read()
