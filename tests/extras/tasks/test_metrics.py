"""Scores from likelihoods that are written here."""

import math
from pathlib import Path
from typing import Any

import pytest

from phalanx.extras.tasks.formats import read_task
from phalanx.extras.tasks.metrics import Likelihood, is_match, mean_centered, scores_of
from phalanx.extras.tasks.options import Options
from phalanx.extras.tasks.requests import Part, Requests
from tests.extras.tasks.conftest import write


def scored(folder: Path, rows: list[Any], nats: list[list[float]]) -> dict[str, float]:
    """Scores of a task whose options or windows have these log likelihoods."""
    task = read_task(Path(write(folder / "task.jsonl", rows)))
    parts, results = list[list[Part]](), list[list[Likelihood]]()
    for some in nats:
        parts.append([Part(len(results) + i, 0) for i in range(len(some))])
        results += [[Likelihood(value, value > -1)] for value in some]
    return scores_of(Requests(task, [], parts), results)


def test_a_choice_is_the_likeliest_of_all_or_of_its_length(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "choices": ["xy", "abcdefgh"], "gold": 1},
        {"query": "b", "choices": ["xyz", "éé"], "gold": 0},
        {"query": "c", "choices": ["x", "y"], "gold": [0, 1]},
    ]
    found = scored(tmp_path, rows, [[-2.0, -4.0], [-6.0, -5.0], [-1.0, -2.0]])
    # -2/2 and -4/8; -6/3 and -5/2 by characters, -5/4 by bytes.
    assert found["acc"] == pytest.approx(1 / 3)
    assert found["acc_norm"] == 1 and found["acc_bytes"] == pytest.approx(2 / 3)
    assert found["acc_stderr"] == pytest.approx(math.sqrt(1 / 3) / math.sqrt(3))
    bits = [4 / 8, 6 / 3, 1 / 1]
    assert found["gold_bits_per_byte"] == pytest.approx(sum(bits) / 3 / math.log(2))


def test_a_score_is_centered_at_that_of_guessing(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"task": {"baseline": "choices", "center": "acc_norm"}},
        {"query": "a", "choices": ["x", "yyyy"], "gold": 1},
        {"query": "a", "choices": ["x", "y", "z", "w"], "gold": 1},
    ]
    found = scored(tmp_path, rows, [[-2.0, -4.0], [-2.0, -4.0, -4.0, -4.0]])
    assert found["acc"] == 0 and found["acc_norm"] == 0.5
    assert found["centered"] == pytest.approx((0.5 - 0.375) / (1 - 0.375))
    rows[0] = {"task": {"baseline": 0.25}}
    other = scored(tmp_path, rows, [[-2.0, -4.0], [-2.0, -4.0, -4.0, -4.0]])
    assert other["centered"] == pytest.approx(-1 / 3)
    assert mean_centered({"a": found, "b": other, "c": {}}) == {
        "centered": pytest.approx((0.2 - 1 / 3) / 2)
    }
    assert mean_centered({"c": {}}) == {}


def test_perplexities(tmp_path: Path) -> None:
    rows = [{"text": "one two\nthree é"}, {"text": "four"}]
    found = scored(tmp_path, rows, [[-10.0, -20.0], [-3.0]])
    assert found["word_perplexity"] == pytest.approx(math.exp(33 / 5))
    assert found["byte_perplexity"] == pytest.approx(math.exp(33 / 20))
    assert found["bits_per_byte"] == pytest.approx(33 / 20 / math.log(2))
    rows = [{"context": "a", "continuation": "b"}, {"context": "a", "continuation": "c"}]
    found = scored(tmp_path, rows, [[-0.5], [-1500.5]])
    assert found["acc"] == 0.5 and found["perplexity"] == math.inf
    assert found["bits_per_byte"] == pytest.approx(1501 / 2 / math.log(2))


@pytest.mark.parametrize(
    ("answer", "right", "options"),
    [
        (" 42\nmore", "42", {}),
        ("Yes.", "yes", {"ignore_case": True, "ignore_punctuation": True}),
        ("x1", "x2", {"ignore_numbers": True}),
        ("so #### 7", "7", {"regexes_to_ignore": ["^.*#### "]}),
        ("a;b", "a", {"until": [";"]}),
    ],
)
def test_what_does_not_count_in_an_answer(answer: str, right: str, options: Any) -> None:
    assert is_match(answer, ["other", right], Options(**options))
    wrong = Options(strip=False, until=[])
    assert not is_match(answer, ["other", right], wrong)
