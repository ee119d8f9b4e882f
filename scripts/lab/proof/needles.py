"""Needles: codes of names inside a long text, and the question for one of them.

A context of held-out text has eight lines, each with the code of another name. It ends with the
beginning of one of these lines once more, which the model is to go on with. The eight codes begin
with different digits, so that the first token in which they differ decides between them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from phalanx.configs.knobs import pluralize

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor

FORMS = {  # of a line: what is asked, and what follows the code
    "sentence": ("The code of {} is", "."),
    "define": ("#define {}_CODE", ""),
}
CODES = 8  # of a context
DEPTHS = [round(0.1 * i, 1) for i in range(1, 10)]  # of the line in question, as shares of the text

_NAMES = """Lisbon Nairobi Helsinki Lima Oslo Quito Hanoi Dakar Riga Tunis Havana Ottawa Warsaw
    Madrid Vienna Athens Cairo Delhi Sofia Tirana Zagreb Manila Bogota Caracas Accra Lusaka"""


@dataclass(frozen=True)
class Question:
    """A context that asks for a code."""

    form: str
    depth: float
    prompt: list[int]
    answers: list[list[int]]  # tokens of all codes in the context, the right one first


@dataclass(frozen=True)
class Answer:
    """Answer of a model to a question."""

    chosen: bool  # the right code is the most likely one of those in the context
    exact: bool  # each of its tokens is the most likely one of all, as greedy decoding needs
    nats: float  # of the tokens of the right code


def questions(
    ids_N: np.ndarray,
    encode: Callable[[str], list[int]],
    end: int,
    *,
    context: int,
    repeats: int,
    seed: int,
) -> Iterator[Question]:
    """`repeats` questions of each form and depth, on text from random places of `ids_N`.

    Args:
        ids_N: tokens of held-out text.
        end: token before a context.
        context: tokens of a context with its answer.

    Raises:
        ValueError: the text, or a context, is too short.
    """
    for form in FORMS:
        for depth in DEPTHS:
            for repeat in range(repeats):
                draw = random.Random(f"{seed} {context} {form} {depth} {repeat}")
                yield _question(ids_N, encode, end, form, depth, context, draw)


def _question(
    ids_N: np.ndarray,
    encode: Callable[[str], list[int]],
    end: int,
    form: str,
    depth: float,
    context: int,
    draw: random.Random,
) -> Question:
    asked, after = FORMS[form]
    firsts = draw.sample(range(1, 10), CODES)
    codes = [f" {first}{draw.randrange(10_000):04d}" for first in firsts]
    names = draw.sample(_NAMES.split(), CODES)
    begins = ["\n" + asked.format(n if form == "sentence" else n.upper()) for n in names]
    lines = [encode(f"{a}{code}{after}\n") for a, code in zip(begins, codes, strict=True)]
    question, answers = encode(begins[0]), [encode(code) for code in codes]
    taken = 1 + sum(map(len, lines)) + len(question) + max(map(len, answers))
    size = context - taken
    if size < context // 4:
        raise ValueError(f"a context of {context} tokens is too short for {CODES} codes")
    if len(ids_N) < size:
        has = pluralize(len(ids_N), "token")
        raise ValueError(f"the text has {has}, and a context takes {size} of them")
    start = draw.randrange(len(ids_N) - size + 1)
    text = ids_N[start : start + size].tolist()
    places = [round(depth * size), *(draw.randrange(size + 1) for _ in lines[1:])]
    prompt, done = [end], 0
    for place, line in sorted(zip(places, lines, strict=True)):
        prompt += text[done:place] + line
        done = place
    return Question(form, depth, prompt + text[done:] + question, answers)


def ask(predictor: "Predictor", question: Question) -> Answer:
    """Read a context once, and then the right code token by token."""
    prompt, right = question.prompt, question.answers[0]
    decoder, same = predictor.decoder, _shared(question.answers)
    logits_1V = decoder.read([prompt], len(prompt) + len(right))
    chosen, exact, nats = False, True, 0.0
    for i, token in enumerate(right):
        if i:
            logits_1V = decoder.next([right[i - 1]], [len(prompt) + i - 1])
        logprob_V = logits_1V[0].log_softmax(-1).cpu()
        nats -= float(logprob_V[token])
        exact = exact and int(logprob_V.argmax()) == token
        if i == same:
            firsts = [answer[i] for answer in question.answers]
            chosen = int(logprob_V[firsts].argmax()) == 0
    return Answer(chosen, exact, nats)


def _shared(answers: Sequence[list[int]]) -> int:
    """Number of first tokens that all answers share; ValueError unless the next one tells them."""
    columns = enumerate(zip(*answers, strict=False))
    same, tokens = next(((i, found) for i, found in columns if len({*found}) > 1), (0, ()))
    if len({*tokens}) < len(answers):
        raise ValueError("codes do not differ in one token: this tokenizer joins digits otherwise")
    return same
