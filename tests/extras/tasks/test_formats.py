"""Rows of the common formats, few-shot examples, and messages on files that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.extras.tasks.formats import FORMATS, Example, read_task, read_tasks
from phalanx.moe.data.host_cache import DataError
from tests.extras.tasks import examples
from tests.extras.tasks.conftest import write


def read(folder: Path, *rows: Any) -> list[Example]:
    return list(read_task(Path(write(folder / "task.jsonl", rows))).examples)


def test_prompts_of_published_sets(tmp_path: Path) -> None:
    """As lm-evaluation-harness writes them, with which test_harness.py compares their scores."""
    first, *_ = read(tmp_path, *examples.HELLASWAG)
    assert first.context == "Baking: How to bake. A cake now. The man"
    assert first.options[:2] == ("does it. Then", "stands up.") and first.gold == (2,)
    _, second, _ = read(tmp_path, *examples.ARC)
    assert second == Example("Question: Which one is it?\nAnswer:", ("1", "22", "three"), (2,))
    third, *_ = read(tmp_path, *examples.MMLU)
    assert third.context == "Is it ?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    assert third.options == ("A", "B", "C", "D") and third.gold == (2,)
    assert third.description.endswith(" about some law.\n\n")


@pytest.mark.parametrize("gold", [1, "1", "B", "y", [1]])
@pytest.mark.parametrize("key", ["gold", "answer", "label", "answerKey"])
def test_a_label_is_a_number_a_letter_or_a_choice(gold: Any, key: str, tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"question": "q", "options": ["x", "y"], key: gold})
    assert found == Example("q", ("x", "y"), (1,))


def test_the_text_of_a_choice_goes_before_its_number(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"query": "1 + 1 =", "choices": ["1", "0", "2"], "gold": "0"})
    assert found.gold == (1,)


def test_rows_are_told_apart_by_their_keys(tmp_path: Path) -> None:
    rows: dict[str, Any] = {
        "schema": examples.SCHEMA[0],
        "choices": {"context": "a", "choices": ["b", "c"], "label": 0},
        "continuation": {"context": "a", "continuation": "b"},
        "answer": {"prompt": "a", "answer": ["b", "c"]},
        "text": {"text": "a"},
    }
    for name, row in rows.items():
        path = Path(write(tmp_path / f"{name}.jsonl", [row]))
        task = read_task(path)
        assert (task.name, task.kind) == (name, FORMATS[name].kind) == (name, name)


def test_solved_examples_before_a_question(tmp_path: Path) -> None:
    rows = [{"query": f"{i}?", "choices": ["no", "yes"], "gold": i % 2} for i in range(4)]
    few = {"task": {"fewshot": 2, "separator": "\n", "description": "Answer.\n"}}
    task = read_task(Path(write(tmp_path / "own.jsonl", [few, *rows])))
    for i, before in enumerate(task.before):
        assert before.startswith("Answer.\n") and before.count("? ") == 2
        assert f"{i}?" not in before
    assert read_task(tmp_path / "own.jsonl").before == task.before, "the same in each reading"
    few["task"]["fewshot_file"] = "own.jsonl"
    task = read_task(Path(write(tmp_path / "other.jsonl", [few, *rows])))
    assert set(task.before) == {"Answer.\n0? no\n1? yes\n"}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "has no rows"),
        (["{"], "line 1 is no JSON"),
        (["[1]"], "line 1 is no JSON object"),
        ([{"a": 1}], "the keys a are of no known format; rename them"),
        ([{"task": {"fewshots": 1}}, {"text": "a"}], "'fewshots' is none of name, format"),
        ([{"task": {"fewshot": "1"}}, {"text": "a"}], "'fewshot' must be written like 0"),
        ([{"task": {"fewshot": True}}, {"text": "a"}], "'fewshot' must be written like 0"),
        ([{"task": {"limit": -1}}, {"text": "a"}], "'limit' is -1, which is too small"),
        ([{"task": {"baseline": 1.0}}, {"text": "a"}], "'baseline' must be below 1"),
        ([{"task": {"baseline": 0.5}}, {"text": "a"}], "has no score"),
        ([{"task": {"regexes_to_ignore": ["("]}}, {"text": "a"}], "no regular expression"),
        ([{"task": {"format": "x"}}, {"text": "a"}], "the format 'x' is none of hellaswag"),
        ([{"task": {"fewshot": 1}}, {"text": "a"}], "fewshot is 1, and there are 0 other"),
        ([{"text": "a"}, {"texts": "a"}], "line 2 has no 'text'"),
        ([{"context": "a", "continuation": ""}], "line 1: continuation is empty"),
        ([{"text": 1}], "line 1: text must be a text, not 1"),
        (['{"text": "\\ud800"}'], "line 1 is no JSON of text"),
        ([{"query": "a", "choices": ["b"], "gold": 0}], "line 1: choices must be a list"),
        ([{"query": "a", "choices": ["b", "c"], "gold": -1}], "the label -1 names none of the 2"),
        ([{"query": "a", "choices": ["b", "c"], "gold": ""}], "the label '' names none of the 2"),
        ([{"query": "a", "choices": ["b", "c"], "gold": "AB"}], "the label 'AB' names none of"),
        ([{"query": "a", "choices": ["b", "c"], "gold": "²"}], "the label '²' names none of"),
        ([{"query": "a", "choices": ["b", "c"], "gold": []}], "the list of right choices is empty"),
        ([{"query": "a", "choices": ["b", "c"]}], "line 1 has no 'gold or answer or"),
        ([{**examples.SCHEMA[0], "continuation": ""}], "line 1: continuation is empty"),
        ([{**examples.ARC[0], "answerKey": "E"}], "answerKey 'E' is none of"),
        ([{**examples.ARC[0], "question": None}], "question must be a text, not null"),
        (
            [{**examples.ARC[0], "choices": {"text": ["a", "b"], "label": ["A", "B", "C"]}}],
            "choices have 2 texts, and as label",
        ),
        ([{**examples.HELLASWAG[0], "ctx_b": None}], "ctx_b must be a text, not null"),
        ([{**examples.MMLU[0], "question": 5}], "question must be a text, not 5"),
        ([{**examples.MMLU[0], "choices": ["a"] * 27}], "there are 27 choices, and 26 letters"),
    ],
)
def test_what_cannot_be_used(rows: list[Any], reason: str, tmp_path: Path) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        read_task(path)
    assert reason in str(caught.value) and "task.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8-sig")
    assert read_task(path).examples == (Example("", answers=("a",)),)


def test_two_tasks_need_two_names(tmp_path: Path) -> None:
    path = write(tmp_path / "task.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match="two tasks have the name 'task'"):
        read_tasks([path, path])
    other = write(tmp_path / "other.jsonl", [{"task": {"name": "a/b"}}, {"text": "a"}])
    assert [task.name for task in read_tasks([path, other])] == ["task", "a_b"]
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8"):
        read_tasks([str(tmp_path / "bytes.jsonl")])
    with pytest.raises(DataError, match="a task is a file of JSON lines"):
        read_tasks([str(tmp_path)])
