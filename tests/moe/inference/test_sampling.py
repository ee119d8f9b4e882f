"""Which token is chosen: greedy, by temperature, from the nucleus; and where a text ends."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from phalanx.moe.inference.sampling import Sampler
from phalanx.moe.run.callbacks.samples import generate

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def drawn(sampler: Sampler, count: int) -> Counter[int]:
    return Counter(sampler(LOGITS) for _ in range(count))


def test_greedy_takes_the_most_likely() -> None:
    assert set(drawn(Sampler(), 20)) == {0}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    count = 4000
    expected = (LOGITS.double() / temperature).softmax(0).tolist()
    found = drawn(Sampler(temperature), count)
    for token, p in enumerate(expected):
        assert abs(found[token] / count - p) < 5 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize(
    ("top_p", "nucleus"), [(0.1, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4)]
)
def test_the_nucleus_has_the_fewest_tokens_of_that_probability(top_p: float, nucleus: int) -> None:
    found = drawn(Sampler(1.0, top_p), 600)
    assert set(found) == set(range(nucleus))
    share = 0.5 / sum([0.5, 0.3, 0.15, 0.05][:nucleus])
    assert abs(found[0] / 600 - share) < 0.1


def test_the_k_most_likely_are_drawn_from() -> None:
    found = drawn(Sampler(1.0, top_k=2), 600)
    assert set(found) == {0, 1} and abs(found[0] / 600 - 0.5 / 0.8) < 0.1
    # The nucleus is that of the tokens that are left.
    assert set(drawn(Sampler(1.0, 0.62, top_k=2), 100)) == {0}
    assert set(drawn(Sampler(1.0, top_k=99), 600)) == {0, 1, 2, 3}


def test_a_seed_gives_one_text() -> None:
    one, other, third = (Sampler(1.0, seed=s) for s in (1, 1, 2))
    texts = [[sampler(LOGITS) for _ in range(50)] for sampler in (one, other, third)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ((-1.0, 1.0), "--temperature -1.0"),
        ((math.nan, 1.0), "--temperature nan"),
        ((1.0, 0.0), "--top-p 0.0"),
        ((1.0, 1.5), "--top-p 1.5"),
        ((0.0, 0.9), "--top-p 0.9: needs a --temperature"),
        ((1.0, 1.0, 0, -1), "--top-k -1: must be 0"),
        ((0.0, 1.0, 0, 5), "--top-k 5: needs a --temperature"),
        ((1.0, 1.0, -1), "--seed -1: must be a number from 0"),
        ((1.0, 1.0, 1 << 63), "--seed 9223372036854775808"),
    ],
)
def test_impossible_options_are_named(values: tuple[Any, ...], option: str) -> None:
    with pytest.raises(ValueError, match=option):
        Sampler(*values)


@pytest.mark.parametrize("temperature", [1e-320, 1e-3, 1e300])
def test_any_temperature_can_be_drawn_from(temperature: float) -> None:
    found = {Sampler(temperature)(LOGITS - shift) for shift in (-1e3, 0.0, 1e3)}
    assert found == {0} or temperature > 1


def test_a_text_ends_where_it_should() -> None:
    assert list(generate(lambda ids: ids[-1] + 1, [1], 3, context=8)) == [2, 3, 4]
    assert list(generate(lambda ids: ids[-1] + 1, [1], 9, context=8, ends=[5])) == [2, 3, 4]


def test_the_model_sees_the_last_tokens_of_its_context() -> None:
    seen: list[list[int]] = []

    def after(ids: list[int]) -> int:
        seen.append(ids)
        return ids[-1] + 1

    assert list(generate(after, [7, 1], 4, context=3)) == [2, 3, 4, 5]
    assert seen == [[7, 1], [7, 1, 2], [1, 2, 3], [2, 3, 4]]
