#!/usr/bin/env python
"""Make questions and answers from the texts of a corpus, as messages of chats.

    python scripts/lab/corpus/make_questions.py data/corpus/train.jsonl --output questions.jsonl

Nobody wrote these questions for a chat: they are patterns, filled from what the texts of
make_corpus.py say of themselves. A model learns from them the form of a chat, and to answer from
its corpus, no more.

    python   what a function does: the first line of its docstring, of its source without that
    c, rust  what a function does: the line that describes it (kernel-doc, ///), of its name
    english  what a word means: the gloss of WordNet
    all      of which kind a text is: the domain, of its first lines
"""

import argparse
import ast
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.scripts.output.bad_input import reports_bad_input

Pair = tuple[str, str]
"""A question and its answer."""

_KERNEL_DOC = re.compile(r"^/\*\*\n \* (\w+)\(\) - (.+)$", re.M)
_RUST_DOC = re.compile(r"^ *\n( *)/// (.+\.)\n(?:\1///.*\n)*(?:\1#\[.*\n)*\1pub fn (\w+)", re.M)
_GLOSS = re.compile(r"^\d{8} \d\d [a-z] [0-9a-f]{2} (\w+) .*\| ([^;\"\n]+)", re.M)
_NAMES = {"c": "C", "rust": "Rust", "python": "Python", "docs": "documentation"}
_LONGEST, _SHOWN = 1200, 400  # characters of a function, and of the beginning of a text


@reports_bad_input("make_questions")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    kinds = defaultdict[str, set[Pair]](set)
    for path in args.corpus:
        with path.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                for kind, pair in pairs(row["text"], row.get("domain", "")):
                    kinds[kind].add(pair)
    drawn = random.Random(args.seed)
    # Sorted, since sets of texts have another order in each process.
    taken = {k: drawn.sample(sorted(v), min(len(v), args.most)) for k, v in sorted(kinds.items())}
    rows = [pair for some in taken.values() for pair in some]
    if not rows:
        raise ValueError(f"{', '.join(map(str, args.corpus))}: nothing in it can be asked")
    drawn.shuffle(rows)
    with args.output.open("w", encoding="utf-8") as file:
        for question, answer in rows:
            asked = {"role": "user", "content": question}
            said = {"role": "assistant", "content": answer}
            file.write(json.dumps({"messages": [asked, said]}, ensure_ascii=False) + "\n")
    parts = ", ".join(f"{len(some):,} {kind}" for kind, some in taken.items())
    print(f"{args.output}: {pluralize(f'{len(rows):,}', 'question')} ({parts})")
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("make_questions", __doc__)
    p.add_argument("corpus", type=Path, nargs="+", metavar="JSONL", help="texts of make_corpus.py")
    p.add_argument("--output", type=Path, required=True, metavar="JSONL", help="messages of chats")
    p.add_argument(
        "--most", type=int, default=20_000, metavar="N", help="of each kind (default: %(default)s)"
    )
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of choice and order")
    return p


def pairs(text: str, domain: str) -> Iterator[tuple[str, Pair]]:
    """Questions that a text answers, each with its kind."""
    if name := _NAMES.get(domain):
        begin = text[:_SHOWN].rpartition("\n")[0] or text[:_SHOWN]
        yield "kinds", (f"Of which kind is this text?\n\n{begin}", f"It is {name}.")
    if domain == "python":
        yield from (("functions", pair) for pair in _functions(text))
    if domain == "c":
        for found in _KERNEL_DOC.finditer(text):
            yield "names", (f"What does {found[1]}() do in the Linux kernel?", found[2].strip())
    if domain == "rust":
        for found in _RUST_DOC.finditer(text):
            yield "names", (f"What does {found[3]} do in Rust?", found[2].strip())
    if domain == "english":
        for found in _GLOSS.finditer(text):
            word = found[1].replace("_", " ")
            yield "words", (f'What does "{word}" mean?', found[2].strip())


def _functions(text: str) -> Iterator[Pair]:
    """Questions about the functions of a Python file, with their source without docstrings."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # of another Python, or cut
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        said = ast.get_docstring(node)
        first = said.splitlines()[0].strip() if said else ""
        doc, end = node.body[0], node.end_lineno or 0
        source = "\n".join([*lines[node.lineno - 1 : doc.lineno - 1], *lines[doc.end_lineno : end]])
        if len(first) > 10 and len(source) < _LONGEST:
            yield f"What does this function do?\n\n{source}", first


if __name__ == "__main__":
    sys.exit(main())
