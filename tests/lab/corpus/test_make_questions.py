"""Questions are filled from what texts say of themselves."""

import json
from pathlib import Path

import pytest

from phalanx.scripts.lab.corpus import make_questions

TEXTS = {
    "python": 'import os\n\n\ndef add(a, b):\n    """Add two numbers.\n\n    More.\n    """\n'
    "    return a + b\n\n\ndef bare():\n    return 1\n",
    "c": "/**\n * kfree() - free previously allocated memory\n * @objp: pointer\n */\n",
    "rust": "\n    /// Appends an element.\n    ///\n    /// More.\n    #[inline]\n"
    "    pub fn push(&mut self) {}\n",
    "english": '00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which exists; "an e"\n',
    "docs": "Title\n=====\n\nA line.\n",
}
FUNCTION = "What does this function do?\n\ndef add(a, b):\n    return a + b"
EXPECTED = {
    FUNCTION: "Add two numbers.",
    "What does kfree() do in the Linux kernel?": "free previously allocated memory",
    "What does push do in Rust?": "Appends an element.",
    'What does "entity" mean?': "that which exists",
    "Of which kind is this text?\n\nTitle\n=====\n\nA line.": "It is documentation.",
}


def test_texts_are_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, output = tmp_path / "train.jsonl", tmp_path / "questions.jsonl"
    rows = [{"text": text, "domain": domain} for domain, text in TEXTS.items()] * 2
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert make_questions.main([str(corpus), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert said == f"{output}: 8 questions (1 functions, 4 kinds, 2 names, 1 words)\n"
    messages = [json.loads(line)["messages"] for line in output.read_text().splitlines()]
    assert {tuple(m["role"] for m in each) for each in messages} == {("user", "assistant")}
    found = {asked["content"]: answer["content"] for asked, answer in messages}
    assert len(found) == 8 and found.items() >= EXPECTED.items()
    first = output.read_text()
    assert make_questions.main([str(corpus), "--output", str(output)]) == 0
    assert output.read_text() == first
    assert make_questions.main([str(corpus), "--output", str(output), "--most", "1"]) == 0
    assert len(output.read_text().splitlines()) == 4


def test_a_corpus_without_questions_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "train.jsonl"
    corpus.write_text('{"text": "a"}\n')
    assert make_questions.main([str(corpus), "--output", str(tmp_path / "q")]) == 2
    assert f"{corpus}: nothing in it can be asked" in capsys.readouterr().err
