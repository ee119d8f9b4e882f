#!/usr/bin/env python
"""Make a corpus of text from packages that anyone can install, the same on every machine.

    python scripts/lab/corpus/make_corpus.py data/corpus [--only NAME ...] [--recipe FILE]

The packages of the recipe are downloaded by pip and apt-get. Their files are the documents: exact
and near duplicates are left out, long ones cut, and the rest shuffled by the seed. Whole folders
are held out. The folder of the corpus then holds

    train.jsonl, train.bin, train.idx      text and tokens of the training part
    held_out/DOMAIN.jsonl, .bin, .idx      the same of the held-out part, a file for each domain
    long.*, held_out/long.*                the same of long files that are not cut (--whole)
    tokenizer.json                         the tokenizer of the recipe, in the form of Hugging Face
    licenses/                              terms of the packages, as they contain them
    manifest.json                          packages, versions, commands, licenses, sizes, sha256

A second call continues with the packages that are there. Texts stay under their own licenses.
"""

import argparse
import fnmatch
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.scripts import prepare_data
from phalanx.scripts.lab.corpus import tiktoken_file
from phalanx.scripts.lab.corpus.archives import members
from phalanx.scripts.lab.corpus.documents import (
    MOST,
    NONE,
    Document,
    Texts,
    held_out_units,
    limited,
    shuffled,
)
from phalanx.scripts.lab.corpus.packages import Package, download, read_recipe, sha256, shown
from phalanx.scripts.output.bad_input import reports_bad_input

RECIPE = Path(__file__).with_name("packages.yaml")


@reports_bad_input("make_corpus")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    make(args)
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("make_corpus", __doc__)
    add = p.add_argument
    add("output", type=Path, metavar="FOLDER", help="folder of the corpus")
    add(
        "--recipe",
        type=Path,
        default=RECIPE,
        metavar="FILE",
        help="packages (default: %(default)s)",
    )
    add("--only", nargs="+", default=[], metavar="NAME", help="packages of the recipe to take")
    add("--downloads", type=Path, metavar="FOLDER", help="packages (default: FOLDER/downloads)")
    add("--held-out", type=float, default=0.01, metavar="SHARE", help="(default: %(default)s)")
    add("--domain-mb", type=float, metavar="MB", help="text of a domain at most (default: all)")
    add(
        "--whole",
        nargs=2,
        type=int,
        metavar=("LEAST", "MOST"),
        help="files of so many KiB are not cut, and are parts of their own, for long contexts",
    )
    add("--whole-mb", type=float, metavar="MB", help="of them in a domain (default: --domain-mb)")
    add("--seed", type=int, default=1, metavar="N", help="of order and held-out part (default: 1)")
    add("--no-tokens", action="store_true", help="write texts and tokenizer alone")
    return p


def make(args: argparse.Namespace) -> None:
    """Write the corpus, or raise ValueError for a package that is not found or not listed."""
    if not 0 <= args.held_out < 1:
        raise ValueError(f"--held-out {args.held_out} must be at least 0 and less than 1")
    for option, most in (("--domain-mb", args.domain_mb), ("--whole-mb", args.whole_mb)):
        if most is not None and most <= 0:
            raise ValueError(f"{option} {most} must be positive")
    whole = _sizes(args.whole)
    tokenizer, packages = read_recipe(args.recipe)
    if unknown := set(args.only) - {package.name for package in packages}:
        names = ", ".join(package.name for package in packages)
        raise ValueError(f"--only {min(unknown)} is not in {args.recipe}, which has {names}")
    packages = [package for package in packages if not args.only or package.name in args.only]
    output: Path = args.output
    shutil.rmtree(output / "held_out", ignore_errors=True)
    (output / "held_out").mkdir(parents=True)
    inputs: list[dict[str, Any]] = []

    def fetched(package: Package) -> Path:
        print(f"{package.name}: {shown(package)}", flush=True)
        downloads = args.downloads or output / "downloads"
        path = download(package, downloads, args.recipe.parent)
        inputs.append(_input(package, path))
        return path

    spool = output / "texts.tmp"
    with spool.open("wb") as file:
        texts = Texts(file, whole)
        for package in packages:
            texts.add(package, fetched(package), _writer(output / "licenses" / package.name))
            found = pluralize(f"{len(texts.documents):,}", "document")
            print(f"  {found} so far", flush=True)
    most = math.inf if args.domain_mb is None else args.domain_mb * 1e6
    most_whole = most if args.whole_mb is None else args.whole_mb * 1e6
    documents = limited(texts.documents, most, most_whole, args.seed)
    parts = _split(documents, args.held_out, args.seed)
    written = _write_parts(output, spool, parts)
    spool.unlink()
    if tokenizer is not None:
        _write_tokenizer(tokenizer, fetched(tokenizer), output / "tokenizer.json")
        if not args.no_tokens:
            for name in parts:
                _tokenize(output, name)
    manifest = {
        "seed": args.seed,
        "held_out": args.held_out,
        "domain_mb": args.domain_mb,
        "whole": args.whole,
        "whole_mb": args.whole_mb,
        "packages": inputs,
        "left_out": dict(texts.left_out),
        "parts": written,
        "sha256": {
            str(path.relative_to(output)): sha256(path)
            for path in sorted(output.rglob("*"))
            if path.suffix in (".jsonl", ".bin", ".idx") or path.name == "tokenizer.json"
        },
    }
    (output / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    for name, numbers in written.items():
        print(f"{name}: {numbers['documents']:,} documents, {numbers['bytes']:,} bytes")


def _sizes(whole: list[int] | None) -> range:
    """Bytes of files that are not cut, from KiB; ValueError if they are not long or no range."""
    if whole is None:
        return NONE
    least, most = whole
    if not MOST // 2 <= least << 10 < most << 10:
        raise ValueError(
            f"--whole {least} {most}: give the KiB of the shortest and of the longest such file, "
            f"from {MOST >> 11} on"
        )
    return range(least << 10, (most << 10) + 1)


def _input(package: Package, path: Path) -> dict[str, Any]:
    return {
        "name": package.name,
        "command": shown(package),
        "file": path.name,
        "license": package.license,
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
    }


def _writer(folder: Path) -> Callable[[str, bytes], object]:
    """Function that keeps a file with the terms of a package, by its name in the package."""

    def write(name: str, content: bytes) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("/", "_")).write_bytes(content)

    return write


def _split(documents: list[Document], share: float, seed: int) -> dict[str, list[Document]]:
    """Shuffled documents by the part that they are of: `train`, or `held_out/DOMAIN`.

    Whole long files are in `long` or `held_out/long`.
    """
    held = held_out_units(documents, share, seed)
    parts: dict[str, list[Document]] = {"train": []}
    for document in shuffled(documents, seed):
        apart = (document.domain, document.unit) in held
        domain = "long" if document.whole else document.domain
        part = f"held_out/{domain}" if apart else "long" if document.whole else "train"
        parts.setdefault(part, []).append(document)
    return parts


def _write_parts(
    output: Path, spool: Path, parts: dict[str, list[Document]]
) -> dict[str, dict[str, Any]]:
    """Write a .jsonl of each part; return their documents and bytes, in total and by domain."""
    written: dict[str, dict[str, Any]] = {}
    with spool.open("rb") as texts:
        for name, documents in parts.items():
            domains: Counter[str] = Counter()
            with (output / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                for document in documents:
                    texts.seek(document.start)
                    text = texts.read(document.size).decode()
                    row = {"text": text, "source": document.source, "domain": document.domain}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    domains[document.domain] += document.size
            sizes = dict(sorted(domains.items()))
            total = sum(sizes.values())
            written[name] = {"documents": len(documents), "bytes": total, "domains": sizes}
    return written


def _write_tokenizer(package: Package, path: Path, output: Path) -> None:
    for name, content in members(path):
        if fnmatch.fnmatchcase(name, package.file):
            tiktoken_file.write(content, output)
            return
    raise ValueError(f"{path} has no file {package.file}, the vocabulary of the recipe")


def _tokenize(output: Path, name: str) -> None:
    command = [str(output / f"{name}.jsonl"), "--output", str(output / name), "--overwrite"]
    command += ["--tokenizer", str(output / "tokenizer.json"), "--eod", tiktoken_file.END]
    if prepare_data.main(command):
        raise ValueError(f"prepare_data failed with {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
