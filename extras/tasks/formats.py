"""Files of tasks: JSON lines in the common formats, as examples of one form.

The prompts of HellaSwag, ARC and MMLU are those of the tasks of these names of
lm-evaluation-harness 0.4.13; rows of other formats have theirs in them, as those of CORE (DCLM,
nanochat) have.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.extras.tasks.options import Options, options_of
from phalanx.moe.data.host_cache import DataError

CHOICES, SCHEMA, CONTINUATION, ANSWER, TEXT = "choices", "schema", "continuation", "answer", "text"
"""Kinds: which choice follows a context; which context a text follows; whether a text is the most
likely one; an answer that is generated; a text, from its first token on."""
_CONTEXT = ("query", "question", "context", "prompt", "input")
_OPTIONS = ("choices", "options", "endings")
_GOLD = ("gold", "answer", "label", "answerKey", "target")
_ANSWER = ("answer", "target", "output")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Doc = Mapping[str, Any]


class Example(NamedTuple):
    """A row of a task."""

    context: str  # question or prompt; empty for a text and for `SCHEMA`
    options: tuple[str, ...] = ()  # choices, or contexts of `SCHEMA`
    gold: tuple[int, ...] = ()  # options that are right
    answers: tuple[str, ...] = ()  # right continuations or answers, or the text
    subject: str = ""  # examples before a question are of its subject
    description: str = ""  # text before them

    def turn(self, delimiter: str) -> str:
        """The example with its answer, as it stands before another question."""
        if not self.options:
            return (
                self.context + between(delimiter, self.context, self.answers[0]) + self.answers[0]
            )
        right = self.options[self.gold[0]]
        if self.answers:  # `SCHEMA`
            return right + delimiter + self.answers[0]
        return self.context + delimiter + right


def between(delimiter: str, context: str, text: str) -> str:
    """Separator of a context and a text, which may bring its own blank."""
    return "" if context[-1:].isspace() or text[:1].isspace() or not context else delimiter


class Format(NamedTuple):
    """A format of rows."""

    kind: str
    keys: tuple[Sequence[str], ...]  # a row has one of each
    read: Callable[[Doc], Example]


@dataclass(frozen=True)
class Task:
    """A task: its options, and its examples with what stands before them."""

    name: str
    kind: str
    options: Options
    examples: tuple[Example, ...]
    before: tuple[str, ...]
    """Description and solved examples before each example; empty strings without any."""


def read_tasks(paths: Sequence[str]) -> list[Task]:
    """The tasks of files; a DataError, in one line, if one of them cannot be used."""
    tasks = [read_task(Path(path).expanduser()) for path in paths]
    names = [task.name for task in tasks]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise DataError(f"{path}: two tasks have the name {name!r}; give one another 'name'")
    return tasks


def read_task(path: Path) -> Task:
    """The task of a file."""
    options, rows = _rows(path)
    if options.limit:
        rows = rows[: options.limit]
    if not rows:
        raise DataError(f"{path} has no rows: give a JSON object a line")
    form = _format(path, options, rows[0][1])
    centered = ("", *centered_scores(form.kind))
    if options.center not in centered or (options.baseline != "" and len(centered) == 1):
        raise DataError(f"{path}: a task of {form.kind} has no score {options.center} to center")
    examples = [_example(path, number, form, row) for number, row in rows]
    pool = examples
    if options.fewshot_file:
        beside = path.parent / Path(options.fewshot_file).expanduser()
        pool = [_example(beside, number, form, row) for number, row in _rows(beside)[1]]
    before = [
        _before(path, options, e, _shots(path, options, i, e, pool)) for i, e in enumerate(examples)
    ]
    name = re.sub(r"[^\w.+-]", "_", options.name or path.name.removesuffix(".jsonl"))
    return Task(name, form.kind, options, tuple(examples), tuple(before))


def centered_scores(kind: str) -> tuple[str, ...]:
    """Scores of a kind of task of which guessing has one, the usual one first."""
    if kind in (CHOICES, SCHEMA):
        return ("acc", "acc_norm", "acc_bytes")
    return {CONTINUATION: ("acc",), ANSWER: ("exact_match",)}.get(kind, ())


def _rows(path: Path) -> tuple[Options, list[tuple[int, Doc]]]:
    """Options, and objects with the numbers of their lines."""
    options, rows = Options(), list[tuple[int, Doc]]()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8; a task is a file of JSON lines") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; a task is a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is no JSON of text: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} is no JSON object")
        if not rows and row.keys() == {"task"} and isinstance(row["task"], dict):
            options = options_of(path, row["task"])
        else:
            rows.append((number, row))
    return options, rows


def _format(path: Path, options: Options, row: Doc) -> Format:
    if options.format:
        if options.format not in FORMATS:
            raise DataError(
                f"{path}: the format {options.format!r} is none of {', '.join(FORMATS)}"
            )
        return FORMATS[options.format]
    for form in FORMATS.values():
        if all(any(key in row for key in some) for some in form.keys):
            return form
    raise DataError(
        f"{path}: the keys {', '.join(row)} are of no known format; rename them, such as to "
        "query, choices and gold"
    )


def _example(path: Path, number: int, form: Format, row: Doc) -> Example:
    try:
        return form.read(row)
    except KeyError as error:
        raise DataError(f"{path}, line {number} has no {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{path}, line {number}: {error}") from None


def _shots(
    path: Path, options: Options, index: int, example: Example, pool: Sequence[Example]
) -> Sequence[Example]:
    """Solved examples before an example: the first of their file, or some others of its own."""
    count = options.fewshot
    if not count:
        return ()
    own = not options.fewshot_file
    same = [
        e for i, e in enumerate(pool) if e.subject == example.subject and (i != index or not own)
    ]
    if count > len(same):
        raise DataError(
            f"{path}: fewshot is {count}, and there are {len(same)} other examples"
            + (f" of {example.subject}" if example.subject else "")
        )
    # A draw for each question: its examples do not depend on which questions come before it.
    return random.Random(1234 + index).sample(same, count) if own else same[:count]


def _before(path: Path, options: Options, example: Example, shots: Sequence[Example]) -> str:
    turns = "".join(shot.turn(options.delimiter) + options.separator for shot in shots)
    return (options.description or example.description) + turns


# --- rows -----------------------------------------------------------------------------------------


def _one(row: Doc, names: Sequence[str]) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise KeyError(" or ".join(names))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, not {json.dumps(value)[:40]}")
    return value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(f"{name} must be a list of at least two texts")
    return tuple(_text(each, name) for each in value)


def _gold(value: Any, options: Sequence[str]) -> tuple[int, ...]:
    """Indexes of right options: from 0, or as a letter, or as the text of one."""
    golds = value if isinstance(value, list) else [value]
    if not golds:
        raise ValueError("the list of right choices is empty")
    return tuple(_index(each, options) for each in golds)


def _index(value: Any, options: Sequence[str]) -> int:
    number = value
    if isinstance(value, str):
        if value in options:
            return options.index(value)
        number = _LETTERS.index(value) if value in set(_LETTERS) else _number(value)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(options):
        raise ValueError(f"the label {value!r} names none of the {len(options)} choices")
    return number


def _of_choices(row: Doc) -> Example:
    options = _texts(_one(row, _OPTIONS), "choices")
    return Example(_text(_one(row, _CONTEXT), "query"), options, _gold(_one(row, _GOLD), options))


def _of_schema(row: Doc) -> Example:
    options = _texts(row["context_options"], "context_options")
    return Example("", options, _gold(_one(row, _GOLD), options), (_continuation(row),))


def _of_continuation(row: Doc) -> Example:
    return Example(_text(row["context"], "context"), answers=(_continuation(row),))


def _continuation(row: Doc) -> str:
    if not (text := _text(row["continuation"], "continuation")):
        raise ValueError("continuation is empty")
    return text


def _of_answer(row: Doc) -> Example:
    value = _one(row, _ANSWER)
    answers = value if isinstance(value, list) and value else [value]
    texts = tuple(_text(str(a) if isinstance(a, int | float) else a, "answer") for a in answers)
    return Example(_text(_one(row, _CONTEXT), "question"), answers=texts)


def _of_text(row: Doc) -> Example:
    return Example("", answers=(_text(row["text"], "text"),))


def _cleaned(text: str) -> str:
    """WikiHow's marks of titles and in brackets, which HellaSwag's texts still have."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _of_hellaswag(row: Doc) -> Example:
    endings = tuple(map(_cleaned, _texts(row["endings"], "endings")))
    label, a, b = (_text(row[name], name) for name in ("activity_label", "ctx_a", "ctx_b"))
    start = f"{label}: {a} {b.capitalize()}"
    return Example(_cleaned(start), endings, (_index(_number(row["label"]), endings),))


def _number(label: Any) -> Any:
    """A label as a number where it is written as text, as HellaSwag's are."""
    return int(label) if isinstance(label, str) and label.isdecimal() else label


def _of_arc(row: Doc) -> Example:
    if isinstance(row["choices"], list):
        return _of_choices(row)
    options, labels = _texts(row["choices"]["text"], "choices"), row["choices"]["label"]
    if not isinstance(labels, list) or len(labels) != len(options):
        raise ValueError(f"choices have {len(options)} texts, and as label {json.dumps(labels)}")
    if row["answerKey"] not in labels:
        raise ValueError(f"answerKey {row['answerKey']!r} is none of {labels}")
    gold = labels.index(row["answerKey"])
    question = _text(row["question"], "question")
    return Example(f"Question: {question}\nAnswer:", options, (gold,))


def _of_mmlu(row: Doc) -> Example:
    texts, subject = _texts(row["choices"], "choices"), _text(row["subject"], "subject")
    if len(texts) > len(_LETTERS):
        raise ValueError(f"there are {len(texts)} choices, and {len(_LETTERS)} letters for them")
    letters = tuple(_LETTERS[: len(texts)])
    lines = [f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True)]
    about = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    return Example(
        "\n".join([_text(row["question"], "question").strip(), *lines, "Answer:"]),
        letters,
        (_index(row["answer"], letters),),
        subject=subject,
        description=about.replace("_", " "),
    )


FORMATS: dict[str, Format] = {
    "hellaswag": Format(
        CHOICES, (("activity_label",), ("ctx_a",), ("ctx_b",), ("endings",)), _of_hellaswag
    ),
    "arc": Format(CHOICES, (("question",), ("choices",), ("answerKey",)), _of_arc),
    "mmlu": Format(CHOICES, (("question",), ("choices",), ("answer",), ("subject",)), _of_mmlu),
    "schema": Format(SCHEMA, (("context_options",), ("continuation",)), _of_schema),
    "choices": Format(CHOICES, (_CONTEXT, _OPTIONS), _of_choices),
    "continuation": Format(CONTINUATION, (("context",), ("continuation",)), _of_continuation),
    "answer": Format(ANSWER, (_CONTEXT, _ANSWER), _of_answer),
    "text": Format(TEXT, (("text",),), _of_text),
}
"""Formats by name, in the order in which a row is compared with them."""
