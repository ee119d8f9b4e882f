#!/usr/bin/env python
"""Score of the tests: how many small mistakes in the code they find.

    python scripts/lab/mutants.py [--every N] [--only TEXT] [--jobs N] [--list]

A mutant is one replaced text of one file (mutants.yaml), in a copy of the tracked files, in which
the tests that should find it are run. It is killed if one of them fails. --every 3 takes each third
mutant, --only those whose file has TEXT in its path. One takes 20 to 60 s of a processor; no GPU.
The exit code is 0 if all were killed, 1 if some survived, 2 if the text of one is not in its file.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from shutil import copy2
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 600  # seconds of a mutant's tests; one that hangs is killed
_FAILED, _PASSED = 1, 0  # exit codes of pytest


class Mutant(NamedTuple):
    """A text that occurs once in a file of the repository, and what takes its place."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]  # files that should find it

    def __str__(self) -> str:
        old, new = (text.replace("\n", " ").strip() for text in (self.old, self.new))
        return f"{self.path}: {old} -> {new or 'nothing'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    args = _parser().parse_args(argv)
    chosen = [m for m in read() if args.only in m.path][:: args.every]
    stale = [m for m in chosen if (ROOT / m.path).read_text("utf-8").count(m.old) != 1]
    for mutant in stale:
        print(f"not once in its file: {mutant}", flush=True)
    chosen = [m for m in chosen if m not in stale]
    if args.list:
        print(*chosen, sep="\n")
        return 2 if stale else 0
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            copies.put(copy_of_tree(Path(folder, str(number))))
        with ThreadPoolExecutor(args.jobs) as pool:
            results = Counter(pool.map(lambda m: _run_in_one(m, copies), chosen))
    print(f"{results['killed']} of {len(chosen)} killed")
    return 2 if stale else int(results["killed"] < len(chosen))


def read() -> list[Mutant]:
    """The mutants of the table, in its order."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return [
        Mutant(file, old, new, tuple(entry["tests"]))
        for file, entry in table.items()
        for old, new in entry["mutants"]
    ]


def copy_of_tree(target: Path) -> Path:
    """Copy all files that git tracks, as they are in the working tree."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def outcome(mutant: Mutant, tree: Path) -> str:
    """`killed`, `survived`, or `broken` if the tests could not run, in a copy of the files."""
    path = tree / mutant.path
    before = path.read_text("utf-8")
    path.write_text(before.replace(mutant.old, mutant.new), "utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", "not gpu and not slow", *mutant.tests]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        path.write_text(before, "utf-8")
    return {_FAILED: "killed", _PASSED: "survived"}.get(done.returncode, "broken")


def _run_in_one(mutant: Mutant, copies: "SimpleQueue[Path]") -> str:
    tree, start = copies.get(), time.perf_counter()
    try:
        result = outcome(mutant, tree)
    finally:
        copies.put(tree)
    print(f"{result:9} {time.perf_counter() - start:4.0f} s  {mutant}", flush=True)
    return result


def _parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    own.add_argument("--every", type=int, default=1, metavar="N", help="each Nth mutant")
    own.add_argument("--only", default="", metavar="TEXT", help="files with TEXT in their path")
    own.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants side by side")
    own.add_argument("--list", action="store_true", help="print the mutants and run none")
    return own


if __name__ == "__main__":
    sys.exit(main())
