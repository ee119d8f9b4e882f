"""Scores of tasks from the likelihoods of their rows, defined as in lm-evaluation-harness 0.4.13.

Legend: C options of an example, in order.
"""

import math
import re
import statistics
import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from phalanx.extras.tasks.formats import (
    ANSWER,
    CHOICES,
    CONTINUATION,
    SCHEMA,
    Example,
    Task,
    centered_scores,
)
from phalanx.extras.tasks.options import Options
from phalanx.extras.tasks.requests import Requests


class Likelihood(NamedTuple):
    """Result of an alternative of a row."""

    nats: float  # sum of the log likelihoods of its labels, at most 0
    greedy: bool  # each label is the most likely token


Results = Sequence[Sequence[Likelihood]]
"""Results by row and alternative."""


def scores_of(
    requests: Requests, results: Results, answers: Sequence[str] = ()
) -> dict[str, float]:
    """Scores of a task by name; `answers` are the generated ones of a task that asks for them."""
    task = requests.task
    if task.kind == ANSWER:
        pairs = zip(task.examples, answers, strict=True)
        right = [is_match(answer, each.answers, task.options) for each, answer in pairs]
        record = _mean("exact_match", right)
    else:
        found = [[results[p.row][p.alternative] for p in parts] for parts in requests.parts]
        if task.kind in (CHOICES, SCHEMA):
            record = _of_choices(task, found)
        elif task.kind == CONTINUATION:
            nats = statistics.fmean(one.nats for (one,) in found)
            record = _mean("acc", [one.greedy for (one,) in found])
            record["perplexity"] = _exp(-nats)
            size = statistics.fmean(len(each.answers[0].encode()) for each in task.examples)
            record["bits_per_byte"] = -nats / size / math.log(2)
        else:
            record = _of_texts(task.examples, [sum(w.nats for w in some) for some in found])
    return record | _centered(task, record)


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and its standard error."""
    record = {name: statistics.fmean(values)}
    if len(values) > 1:
        record[f"{name}_stderr"] = statistics.stdev(map(float, values)) / math.sqrt(len(values))
    return record


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _of_choices(task: Task, found: Sequence[Sequence[Likelihood]]) -> dict[str, float]:
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    bits = []
    for example, some in zip(task.examples, found, strict=True):
        nats_C = np.array([each.nats for each in some])
        texts = example.options
        sizes = (
            np.ones(len(texts)),
            np.array([len(text) for text in texts]),
            np.array([len(text.encode()) for text in texts]),
        )
        for name, size_C in zip(right, sizes, strict=True):
            # An empty option has no length: it never wins, as its likelihood is then -inf.
            best = int(np.argmax(nats_C / np.where(size_C, size_C, 1e-9)))
            right[name].append(best in example.gold)
        gold = example.gold[0]
        size = len((example.answers or (texts[gold],))[0].encode())
        bits.append(-nats_C[gold] / math.log(2) / max(1, size))
    record: dict[str, float] = {}
    for name, values in right.items():
        record |= _mean(name, values)
    return record | {"gold_bits_per_byte": statistics.fmean(bits)}


def _of_texts(examples: Sequence[Example], nats: Sequence[float]) -> dict[str, float]:
    texts = [example.answers[0] for example in examples]
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    total = -sum(nats)
    return {
        "word_perplexity": _exp(total / words),
        "byte_perplexity": _exp(total / size),
        "bits_per_byte": total / size / math.log(2),
    }


def _centered(task: Task, record: dict[str, float]) -> dict[str, float]:
    """(score - guess) / (1 - guess), 0 for guessing and 1 at best, as CORE averages scores."""
    guess = task.options.baseline
    if guess == "":
        return {}
    if guess == "choices":
        guess = statistics.fmean(1 / max(1, len(each.options)) for each in task.examples)
    score = record[task.options.center or centered_scores(task.kind)[0]]
    return {"centered": (score - float(guess)) / (1 - float(guess))}


def is_ended(answer: str, options: Options) -> bool:
    """Whether an answer has a text that ends it."""
    return any(stop and stop in answer for stop in options.until)


def is_match(answer: str, right: Sequence[str], options: Options) -> bool:
    """Whether an answer, cut where it ends, is one of the right ones after what is ignored."""
    for stop in options.until:
        if stop:
            answer = answer.split(stop)[0]
    if options.strip:
        answer, right = answer.strip(), [text.strip() for text in right]
    return _plain(answer, options) in {_plain(text, options) for text in right}


def _plain(text: str, options: Options) -> str:
    for pattern in options.regexes_to_ignore:
        text = re.sub(pattern, "", text)
    if options.ignore_case:
        text = text.lower()
    ignored = string.punctuation if options.ignore_punctuation else ""
    ignored += string.digits if options.ignore_numbers else ""
    return text.translate(str.maketrans("", "", ignored))


def mean_centered(scores: dict[str, dict[str, float]]) -> dict[str, float]:
    """Mean of the centered scores of the tasks that have one; empty without any."""
    values = [record["centered"] for record in scores.values() if "centered" in record]
    return {"centered": statistics.fmean(values)} if values else {}
