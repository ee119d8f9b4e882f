"""Rows of tokens by the rules of lm-evaluation-harness, with a tokenizer that merges."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.extras.tasks.formats import read_task
from phalanx.extras.tasks.requests import Part, Requests, Row, requests_of
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.codec import Codec
from tests.extras.tasks.conftest import write

WORDS = ["<end>", "a", "b", "c", " ", " a", " b", "ab"]
END, A, B, C, BLANK, BLANK_A, BLANK_B, AB = range(8)


def requests(folder: Path, *rows: Any, context: int = 8) -> Requests:
    merges = [(" ", "a"), (" ", "b"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(WORDS)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("_", "isolated")
    codec = Codec(tokenizer, (END,))
    return requests_of(read_task(Path(write(folder / "task.jsonl", rows))), codec, context)


def test_a_blank_before_a_continuation_belongs_to_it(tmp_path: Path) -> None:
    found = requests(tmp_path, {"query": "c ", "choices": ["a", "bc"], "gold": 0})
    # Delimiter and blank: "c" and "  a".
    assert found.rows == [
        Row([C, BLANK], [[BLANK, BLANK_A]]),
        Row([C, BLANK, BLANK_B], [[BLANK, BLANK_B, C]]),
    ]
    assert found.parts == [[Part(0, 0), Part(1, 0)]]


def test_what_merges_across_the_boundary_is_split_where_the_context_ends(tmp_path: Path) -> None:
    row = {"context": "ca", "continuation": "bc"}
    found = requests(tmp_path, {"task": {"delimiter": ""}}, row)
    # c, a and of c, ab, c what follows two tokens.
    assert found.rows == [Row([C, A], [[C]])]


def test_an_empty_context_is_the_end_of_a_document(tmp_path: Path) -> None:
    found = requests(tmp_path, {"context": "", "continuation": "ca"})
    assert found.rows == [Row([END, C], [[C, A]])]


def test_choices_of_one_token_share_a_forward_pass(tmp_path: Path) -> None:
    row = {"query": "c", "choices": ["a", "b"], "gold": 0}
    found = requests(tmp_path, row, {"query": "c", "choices": ["a", "bc"], "gold": 0})
    assert found.rows[0] == Row([C], [[BLANK_A], [BLANK_B]]) and len(found.rows) == 3
    assert found.parts == [[Part(0, 0), Part(0, 1)], [Part(1, 0), Part(2, 0)]]


def test_the_start_of_what_is_too_long_is_left_out(tmp_path: Path) -> None:
    found = requests(tmp_path, {"context": "cbcbcb", "continuation": " ac"}, context=4)
    assert found.rows == [Row([B, C, B, BLANK_A], [[BLANK_A, C]])]
    found = requests(tmp_path, {"context": "c", "continuation": " acbcacb"}, context=4)
    assert found.rows == [Row([B, C, A, C], [[C, A, C, B]])]


def test_windows_of_a_text_predict_each_token_once(tmp_path: Path) -> None:
    found = requests(tmp_path, {"text": "cbcbcbcbca"}, context=4)
    assert found.rows == [
        Row([END, C, B, C], [[C, B, C, B]]),
        Row([B, C, B, C], [[C, B, C, B]]),
        Row([B, C, B, C], [[C, A]]),
    ]
    assert found.parts == [[Part(0, 0), Part(1, 0), Part(2, 0)]]


def test_a_prompt_leaves_room_for_its_answer(tmp_path: Path) -> None:
    row = {"prompt": "cbcbcbcb", "answer": "a"}
    found = requests(tmp_path, {"task": {"max_tokens": 3}}, row)
    assert found.rows == [Row([B, C, B, C, B], [[0]])]
    with pytest.raises(DataError, match="max_tokens is 8, and the model's context has 8 tokens"):
        requests(tmp_path, {"task": {"max_tokens": 8}}, row)


def test_a_text_without_tokens_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="example 2 of task has a text without tokens"):
        requests(tmp_path, {"text": "a"}, {"text": ""})
