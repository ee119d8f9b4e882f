"""Scores of tasks by forward passes, whatever computes these."""

import math
from collections.abc import Sequence

from phalanx.extras.tasks.formats import ANSWER
from phalanx.extras.tasks.forward import Forward
from phalanx.extras.tasks.metrics import Likelihood, is_ended, mean_centered, scores_of
from phalanx.extras.tasks.requests import Requests, Row
from phalanx.moe.data.tokenizer.codec import Codec

Scores = dict[str, dict[str, float]]
"""Scores by task and name; with `""` those over all tasks."""


class NotFinite(ArithmeticError):
    """Likelihoods of a task are NaN or infinite, on all ranks."""


def score(tasks: Sequence[Requests], forward: Forward, codec: Codec) -> Scores:
    """Scores of tasks. Collective in a run.

    Raises:
        NotFinite: the model computes NaN or infinite numbers.
    """
    # Rows of all tasks together, so that few passes are not full.
    kinds = [each.task.kind == ANSWER for each in tasks]
    rows = [row for each, asks in zip(tasks, kinds, strict=True) if not asks for row in each.rows]
    results = iter([each.alternatives for each in forward(rows)] if rows else [])
    scores: Scores = {}
    for each, asks in zip(tasks, kinds, strict=True):
        name, found, answers = each.task.name, list[list[Likelihood]](), list[str]()
        if asks:
            answers = generate(each, forward, codec)
        else:
            found = [next(results) for _ in each.rows]
            if not all(math.isfinite(one.nats) for some in found for one in some):
                raise NotFinite(name)
        scores[name] = scores_of(each, found, answers)
    over_all = mean_centered(scores)
    return scores | ({"": over_all} if over_all else {})


def generate(requests: Requests, forward: Forward, codec: Codec) -> list[str]:
    """Greedy answers of a task, each up to a stop or the end of a document."""
    options, prompts = requests.task.options, [row.inputs for row in requests.rows]
    made: list[list[int]] = [[] for _ in prompts]
    texts, open_ones = [""] * len(prompts), list(range(len(prompts)))
    for _ in range(options.max_tokens):
        if not open_ones:
            break
        rows = [Row(prompts[i] + made[i], [[0]]) for i in open_ones]
        going_on = []
        for i, scored in zip(open_ones, forward(rows), strict=True):
            if not math.isfinite(scored.alternatives[0].nats):
                raise NotFinite(requests.task.name)
            if scored.token in codec.ends:
                continue
            made[i].append(scored.token)
            texts[i] = codec.decode(made[i])
            if not is_ended(texts[i], options):
                going_on.append(i)
        open_ones = going_on
    return texts


def numbers_of(scores: Scores) -> dict[str, float]:
    """Scores by `task/score`; those over all tasks by their name."""
    return {
        "/".join(filter(None, (task, name))): value
        for task, record in scores.items()
        for name, value in record.items()
    }


def lines_of(scores: Scores) -> str:
    """A line for each task: `   sums  acc 0.310 +- 0.046, acc_norm 0.300 +- 0.046`."""
    width = max(len(task) for task in scores)
    lines = []
    for task, record in scores.items():
        texts = []
        for name, value in record.items():
            if name.endswith("_stderr"):
                continue
            error = record.get(f"{name}_stderr")
            texts.append(f"{name} {value:.4g}" + ("" if error is None else f" +- {error:.2g}"))
        lines.append(f"   {(task or 'all').ljust(width)}  {', '.join(texts)}")
    return "\n".join(lines)
