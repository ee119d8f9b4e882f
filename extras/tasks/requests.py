"""Examples as rows of tokens, split as lm-evaluation-harness splits them.

Context and continuation are encoded together; what comes behind as many tokens as the context alone
has is the continuation. Blanks at the end of a context belong to it. An empty context is the token
that ends documents. What is longer than the model's context loses its start. Texts are read in
windows that predict each token once.

Legend: K alternatives of a row, N labels of each.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.extras.tasks.formats import ANSWER, CHOICES, CONTINUATION, SCHEMA, TEXT, Task, between
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.codec import Codec


class Row(NamedTuple):
    """A forward pass of one sequence."""

    inputs: list[int]
    labels_KN: list[list[int]]
    """Labels of the last N inputs, in K alternatives."""


class Part(NamedTuple):
    """Place of a result: a row, and one of its alternatives."""

    row: int
    alternative: int


@dataclass(frozen=True)
class Requests:
    """Rows of a task."""

    task: Task
    rows: list[Row]
    parts: list[list[Part]]
    """Places by example: of its options, of its continuation, or of the windows of its text; of an
    answer one, whose most likely token begins it."""


class Encoded:
    """Tokens of texts, which are encoded together."""

    def __init__(self, codec: Codec, texts: Iterable[str]) -> None:
        if not codec.ends:
            raise DataError(
                "the token that ends a document is not known: a tokenizer_config.json beside the "
                "tokenizer.json names it, or --eod TOKEN of evaluate.py"
            )
        self.end = codec.ends[0]
        wanted = list(dict.fromkeys(texts))
        for text in wanted:
            if fault := codec.encoder.refused(text):
                raise DataError("".join(fault))
        rows = codec.encoder.encode(wanted)
        self._ids = {text: ids.tolist() for text, ids in zip(wanted, rows, strict=True)}

    def __call__(self, text: str) -> list[int]:
        return self._ids[text]

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context, at least one, and of a continuation after it."""
        if not context:
            ids = self(continuation)
            starts = ids[:1] == [self.end]
            return (ids[:1], ids[1:]) if starts else ([self.end], ids)
        context, continuation = _split(context, continuation)
        before, both = self(context), self(context + continuation)
        return before or [self.end], both[len(before) :]


def _split(context: str, continuation: str) -> tuple[str, str]:
    stem = context.rstrip()
    return stem, context[len(stem) :] + continuation


def requests_of(task: Task, codec: Codec, context: int) -> Requests:
    """Rows of a task for a model of `context` tokens; a DataError for what cannot be scored."""
    pairs = [list(_pairs(task, i)) for i in range(len(task.examples))]
    encoded = Encoded(codec, (t for some in pairs for pair in some for t in _texts(*pair)))
    rows, parts = list[Row](), list[list[Part]]()
    for number, some in enumerate(pairs, 1):
        if task.kind == TEXT:
            own = list(_windows(encoded(some[0][1]), encoded.end, context))
        elif task.kind == ANSWER:
            own = [_prompt(task, encoded(some[0][0]) or [encoded.end], context)]
        else:
            own = [_row(*encoded.pair(*pair), context) for pair in some]
        if not own or not all(labels for row in own for labels in row.labels_KN):
            raise DataError(f"example {number} of {task.name} has a text without tokens")
        shared = _shared(own) if task.kind == CHOICES else None
        first, together = len(rows), shared is not None
        rows += own if shared is None else [shared]
        parts.append([Part(first, i) if together else Part(first + i, 0) for i in range(len(own))])
    return Requests(task, rows, parts)


def _pairs(task: Task, index: int) -> Iterator[tuple[str, str]]:
    """Contexts and continuations of an example."""
    example, before, delimiter = task.examples[index], task.before[index], task.options.delimiter
    context = before + example.context
    if task.kind == CHOICES:
        yield from ((context, delimiter + option) for option in example.options)
    elif task.kind == SCHEMA:
        text = delimiter + example.answers[0]
        yield from ((before + option, text) for option in example.options)
    elif task.kind == CONTINUATION:
        text = example.answers[0]
        yield context, between(delimiter, context, text) + text
    elif task.kind == TEXT:
        yield "", example.answers[0]
    else:
        yield context, ""


def _texts(context: str, continuation: str) -> list[str]:
    if not continuation:
        return [context, context.rstrip()]
    if not context:
        return [continuation]
    context, continuation = _split(context, continuation)
    return [context, context + continuation]


def _row(before: list[int], after: list[int], context: int) -> Row:
    ids = (before + after)[-(context + 1) :]
    count = min(len(after), len(ids) - 1)
    return Row(ids[:-1], [ids[len(ids) - count :]])


def _prompt(task: Task, ids: list[int], context: int) -> Row:
    """A row whose label is not known yet; its answer fits behind it."""
    room = context - task.options.max_tokens
    if room < 1:
        raise DataError(
            f"{task.name}: max_tokens is {task.options.max_tokens}, and the model's context has "
            f"{context} tokens"
        )
    return Row(ids[-room:], [[0]])


def _windows(ids: list[int], end: int, context: int) -> Iterator[Row]:
    """Windows that predict each token once; the last one also sees tokens before it."""
    for start in range(0, len(ids), context):
        stop = min(start + context, len(ids))
        before = ids[stop - context - 1 : start] if start else [end]
        yield Row(before + ids[start : stop - 1], [ids[start:stop]])


def _shared(rows: Sequence[Row]) -> Row | None:
    """One row for choices of one token each after the same context; None for others."""
    same = all(row.inputs == rows[0].inputs and len(row.labels_KN[0]) == 1 for row in rows)
    return Row(rows[0].inputs, [row.labels_KN[0] for row in rows]) if same else None
