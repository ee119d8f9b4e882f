"""Texts of packages: which are taken, which are held out, and their order."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from phalanx.scripts.lab.corpus.archives import members
from phalanx.scripts.lab.corpus.duplicates import NearDuplicates
from phalanx.scripts.lab.corpus.packages import Package, is_license

LEAST, MOST = 200, 65_536  # bytes of a document: shorter files are left out, longer ones are cut
NONE = range(0)  # sizes of files that are not cut


@dataclass(frozen=True)
class Document:
    """A text in the spool file."""

    domain: str
    source: str  # package and name of the file, with `#n` after it for the n-th part of a long one
    unit: str  # folder of the file in its package, or the file: all of it is held out, or nothing
    sha256: str
    start: int
    size: int
    whole: bool = False  # a long file, not cut


@dataclass
class Texts:
    """Documents of all packages, without exact and near duplicates; `spool` takes the texts.

    Files whose bytes are within `whole` are not cut.
    """

    spool: BinaryIO
    whole: range = NONE
    documents: list[Document] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # files by the reason
    _files: set[bytes] = field(default_factory=set)
    _near: NearDuplicates = field(default_factory=NearDuplicates)
    _end: int = 0

    def add(
        self, package: Package, path: Path, license_text: Callable[[str, bytes], object]
    ) -> None:
        """Add the texts of a package, in the order of its archive.

        `license_text` is called with name and content of files with the terms of the package.
        """
        for name, content in members(path):
            name = name.removeprefix("./")
            if is_license(name):
                license_text(name, content)
            domain = package.domain_of(name)
            if domain is not None:
                self._add_file(domain, package, name, content)

    def _add_file(self, domain: str, package: Package, name: str, content: bytes) -> None:
        try:
            text = content.decode().replace("\r\n", "\n").strip()
        except UnicodeDecodeError:
            self.left_out["no UTF-8"] += 1
            return
        digest = hashlib.sha256(text.encode()).digest()
        if len(text.encode()) < LEAST or "\0" in text:
            self.left_out[f"shorter than {LEAST} bytes, or binary"] += 1
        elif digest in self._files:
            self.left_out["duplicate"] += 1
        elif not self._near.keep(text):
            self.left_out["near-duplicate"] += 1
        else:
            self._files.add(digest)
            file = f"{package.name}/{name}"
            unit = file if package.unit == "file" else file.rpartition("/")[0]
            whole = len(text.encode()) in self.whole
            parts = [text] if whole else list(pieces(text))
            for number, part in enumerate(parts, 1):
                source = file + (f"#{number}" if len(parts) > 1 else "")
                data = part.encode()
                self.spool.write(data)
                sha = hashlib.sha256(data).hexdigest()
                self.documents.append(
                    Document(domain, source, unit, sha, self._end, len(data), whole)
                )
                self._end += len(data)


def pieces(text: str) -> Iterator[str]:
    """Parts of at most `MOST` characters, cut at the last empty line or line of each, if any."""
    while len(text) > MOST:
        cut = max(text.rfind("\n\n", 1, MOST), 0) or max(text.rfind("\n", 1, MOST), 0) or MOST
        yield text[:cut]
        text = text[cut:].lstrip("\n")
    if text:
        yield text


def held_out_units(documents: list[Document], share: float, seed: int) -> set[tuple[str, str]]:
    """(domain, unit) of the documents that are held out: about `share` of the bytes of a domain.

    Units are taken in the order of a hash of the seed and their name, at most to twice the share. A
    domain of a single unit has none.
    """
    sizes: dict[str, Counter[str]] = {}
    for document in documents:
        sizes.setdefault(document.domain, Counter())[document.unit] += document.size
    chosen = set()
    for domain, units in sizes.items():
        total, taken, smallest = sum(units.values()), 0, min(units.values())
        for unit in sorted(units, key=lambda name: _hash(seed, name))[:-1]:
            if taken >= share * total:
                break
            if taken + units[unit] <= max(2 * share * total, smallest):
                chosen.add((domain, unit))
                taken += units[unit]
    return chosen


def limited(documents: list[Document], most: float, most_whole: float, seed: int) -> list[Document]:
    """Documents of at most `most` bytes of each domain, the first ones of the shuffled order.

    Long files that are not cut count apart, up to `most_whole`.
    """
    sizes: Counter[tuple[str, bool]] = Counter()
    taken = []
    for document in shuffled(documents, seed):
        kind = document.domain, document.whole
        if sizes[kind] + document.size <= (most_whole if document.whole else most):
            sizes[kind] += document.size
            taken.append(document)
    return taken


def shuffled(documents: list[Document], seed: int) -> list[Document]:
    """The documents in an order that the seed and their content decide."""
    return sorted(documents, key=lambda document: _hash(seed, document.sha256))


def _hash(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed} {text}".encode()).digest()
