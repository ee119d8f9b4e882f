#!/usr/bin/env python
"""Make small tasks for run.tasks and evaluate.py --tasks, as files of JSON lines.

    python scripts/make_tasks.py tasks --embedded
    python scripts/make_tasks.py tasks --text held_out.jsonl --corpus wiki.jsonl [--rows 200]

Always made are sums and products, as answers (arithmetic) and as choices (arithmetic_choices), and
series of made-up words that are to be repeated (copying). Of --text, which the model was not
trained on, come passages whose last word is a choice of four (cloze). Of --corpus, which it was
trained on, come words that have the same next word wherever they stand there (facts). --embedded
takes the text of data=embedded: the last 2 %, which data.split holds out, and all before.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.moe.data.host_cache import DataError, cache_folder
from phalanx.moe.data.inputs import find_inputs
from phalanx.moe.data.text_rows import cut, read, read_keys
from phalanx.moe.data.token_files import embedded, open_corpus
from phalanx.parallel.object_store import folder_argument
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.reader import may_leave

_PIECE = 1 << 25  # bytes of a part of a large input file
_HELD_OUT = 0.02  # share of data=embedded that the default of data.split holds out
_MOST_BYTES = 8 << 20  # UTF-8 bytes of text that are read for cloze, and for facts
_CHOICES = 4
_CONTEXT_WORDS = 24  # of a passage before its last word
_FACT_WORDS = 4  # words whose next one is a fact
_OFTEN, _SURE = 4, 0.95  # occurrences of a fact, and its share of them, at least
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"[^\W\d_]{3,}")  # words that are asked for

Row = dict[str, Any]


@may_leave
@reports_bad_input("make_tasks")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    if args.rows < 2 or args.seed < 0:
        raise ValueError("--rows must be at least 2, and --seed at least 0")
    if args.embedded and (args.text or args.corpus):
        raise ValueError("--embedded is in place of --text and --corpus: leave it out")
    texts, corpus = _documents(args)
    made = dict(_tasks(args.rows, args.seed, texts, corpus))
    taken = [str(path) for name in made if (path := args.out / f"{name}.jsonl").exists()]
    if taken:
        raise ValueError(f"{taken[0]} exists: delete it, or name another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, (options, rows) in made.items():
        lines = [{"task": options}, *rows]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{args.out / name}.jsonl: {pluralize(len(rows), 'example')}")
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("make_tasks", __doc__)
    add = p.add_argument
    add("out", type=folder_argument, metavar="OUT", help="folder of the files")
    add("--text", nargs="+", default=[], metavar="FILE", help="held-out text: jsonl, Parquet")
    add("--corpus", nargs="+", default=[], metavar="FILE", help="text that is trained on")
    add("--embedded", action="store_true", help="both are of data=embedded")
    add("--key", default="text", help="JSON key or Parquet column of the text (default: text)")
    add("--rows", type=int, default=200, metavar="N", help="most examples of a task (default: 200)")
    add("--seed", type=int, default=1, metavar="N", help="another one makes other examples")
    return p


def _documents(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Held-out documents, and some of the corpus."""
    if not args.embedded:
        return _read(args.text, args.key), _read(args.corpus, args.key)
    corpus = open_corpus(prefix := embedded(cache_folder("")))
    ids, ends = np.memmap(f"{prefix}.bin", corpus.dtype, "r"), np.cumsum(corpus.lengths)
    first = round(len(ends) * (1 - _HELD_OUT))
    pieces = np.split(ids, ends[:-1])
    texts = [bytes(piece[:-1].astype(np.uint8)).decode(errors="replace") for piece in pieces]
    return _some(texts[first:]), _some(texts[:first])


def _read(files: Sequence[str], key: str) -> list[str]:
    reading = read_keys([key])
    pieces = (piece for path in find_inputs(files).files for piece, _ in cut(path, reading, _PIECE))
    return _some(text for piece in pieces for text in read(piece, reading))


def _some(texts: Iterable[str]) -> list[str]:
    found, size = [], 0
    for text in texts:
        found.append(text)
        size += len(text.encode(errors="replace"))
        if size >= _MOST_BYTES:
            break
    return found


def _tasks(
    rows: int, seed: int, texts: Sequence[str], corpus: Sequence[str]
) -> Iterator[tuple[str, tuple[Row, list[Row]]]]:
    """Names, options and rows; each task has random numbers of its own."""
    shots = {"fewshot": min(4, rows - 1), "separator": "\n"}
    answers = {**shots, "until": ["\n"], "max_tokens": 8, "baseline": 0.0}
    yield "arithmetic", (answers, sums(rows, random.Random(seed)))
    choices = {**shots, "baseline": "choices"}
    yield "arithmetic_choices", (choices, sum_choices(rows, random.Random(seed + 1)))
    yield "copying", ({"baseline": 0.0}, copies(rows, random.Random(seed + 2)))
    if texts:
        yield "cloze", ({"baseline": "choices"}, clozes(texts, rows, random.Random(seed + 3)))
    if corpus:
        yield "facts", ({"baseline": "choices"}, facts(corpus, rows, random.Random(seed + 4)))


# --- tasks ----------------------------------------------------------------------------------------


def sums(rows: int, rng: random.Random) -> list[Row]:
    """Sums, differences and products of small numbers, no question twice."""
    found: dict[str, Row] = {}
    while len(found) < min(rows, 5000):
        sign = rng.choice("+-*")
        most = 9 if sign == "*" else 99
        a, b = rng.randint(0, most), rng.randint(0, most)
        if sign == "-" and a < b:
            a, b = b, a
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        found[f"{a} {sign} {b} ="] = {"question": f"{a} {sign} {b} =", "answer": str(value)}
    return list(found.values())


def sum_choices(rows: int, rng: random.Random) -> list[Row]:
    """The same with near numbers as wrong choices."""
    made = []
    for row in sums(rows, rng):
        right = int(row["answer"])
        near = [n for n in range(max(0, right - 11), right + 12) if n != right]
        wrong = rng.sample(near, _CHOICES - 1)
        made.append(_choice(row["question"], str(right), [str(n) for n in wrong], rng))
    return made


def copies(rows: int, rng: random.Random) -> list[Row]:
    """Series of made-up words twice, the second time without their second half."""
    made = []
    for _ in range(rows):
        words = [
            "".join(rng.choice(letters) for letters in ("bdfgklmnprst", "aeiou", "bdgklmnprst"))
            for _ in range(rng.randint(4, 8))
        ]
        half = len(words) // 2
        context = f"{' '.join(words)}\n{' '.join(words[:half])}"
        made.append({"context": context, "continuation": " " + " ".join(words[half:])})
    return made


def clozes(texts: Sequence[str], rows: int, rng: random.Random) -> list[Row]:
    """Passages without their last word, and words that end other passages."""
    passages: list[tuple[str, str]] = []
    for text in texts:
        words = list(_WORD.finditer(text))
        for last in range(_CONTEXT_WORDS, len(words), _CONTEXT_WORDS):
            word = words[last]
            if _NAME.fullmatch(word[0]) and text[word.start() - 1] == " ":
                start = words[last - _CONTEXT_WORDS].start()
                passages.append((text[start : word.start()].rstrip(), word[0]))
    return _asked(passages, rows, rng, "--text has too little text for a cloze")


def facts(corpus: Sequence[str], rows: int, rng: random.Random) -> list[Row]:
    """Words whose next word is nearly always the same, and such words of others."""
    following: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for text in corpus:
        words = list(_WORD.finditer(text))
        for last in range(_FACT_WORDS, len(words)):
            word = words[last]
            if _NAME.fullmatch(word[0]) and text[word.start() - 1] == " ":
                context = text[words[last - _FACT_WORDS].start() : word.start()].rstrip()
                following[context][word[0]] += 1
    known = []
    for context, counts in following.items():
        ((answer, often),) = counts.most_common(1)
        if often >= max(_OFTEN, _SURE * counts.total()):
            known.append((context, answer))
    return _asked(known, rows, rng, "--corpus repeats too few words for facts")


def _asked(
    pairs: Sequence[tuple[str, str]], rows: int, rng: random.Random, fault: str
) -> list[Row]:
    """Questions of contexts and words, with words of others as wrong choices."""
    words = sorted({word for _, word in pairs})
    if len(words) < _CHOICES:
        raise DataError(f"{fault}: give more")
    made = []
    for context, word in rng.sample(pairs, min(rows, len(pairs))):
        wrong = [w for w in rng.sample(words, _CHOICES) if w != word]
        made.append(_choice(context, word, wrong[: _CHOICES - 1], rng))
    return made


def _choice(query: str, right: str, wrong: Sequence[str], rng: random.Random) -> Row:
    choices = [right, *wrong]
    rng.shuffle(choices)
    return {"query": query, "choices": choices, "gold": choices.index(right)}


if __name__ == "__main__":
    sys.exit(main())
