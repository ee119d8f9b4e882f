"""Small tasks that are made: right answers, facts of the corpus, held-out text."""

import json
import random
from pathlib import Path

import pytest

from phalanx.extras.tasks.formats import read_task
from phalanx.scripts import make_tasks


def made(out: Path, *argv: str) -> dict[str, list[dict]]:
    assert make_tasks.main([str(out), *argv]) == 0
    files = sorted(out.glob("*.jsonl"))
    return {f.stem: [json.loads(line) for line in f.read_text().splitlines()][1:] for f in files}


def test_sums_and_copies_are_right(tmp_path: Path) -> None:
    found = made(tmp_path / "a", "--rows", "50")
    assert list(found) == ["arithmetic", "arithmetic_choices", "copying"]
    assert all(len(rows) == 50 for rows in found.values())
    for row in found["arithmetic"]:
        assert str(eval(row["question"].removesuffix("="))) == row["answer"]
    for row in found["arithmetic_choices"]:
        assert len(set(row["choices"])) == 4
        assert str(eval(row["query"].removesuffix("="))) == row["choices"][row["gold"]]
    for row in found["copying"]:
        first, second = (row["context"] + row["continuation"]).split("\n")
        assert first == second and row["continuation"].startswith(" ")
    assert made(tmp_path / "b", "--rows", "50") == found
    assert made(tmp_path / "c", "--rows", "50", "--seed", "2") != found
    for name in found:
        task = read_task(tmp_path / "a" / f"{name}.jsonl")
        assert len(task.examples) == 50 and task.options.baseline != ""


def test_facts_are_what_the_corpus_repeats(tmp_path: Path) -> None:
    capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Peru": "Lima"}
    facts = [f"The capital city of {land} is {city} today.\n" for land, city in capitals.items()]
    varied = [f"The number that follows it was {word} then.\n" for word in ("one", "two", "six")]
    corpus, held = tmp_path / "corpus.jsonl", tmp_path / "held.txt"
    corpus.write_text("".join(json.dumps({"text": t}) + "\n" for t in (facts + varied) * 5))
    words = ["north", "south", "east", "west", "and", "a", "to 3"]
    held.write_text(" ".join(random.Random(0).choices(words, k=2000)))
    found = made(tmp_path / "out", "--corpus", str(corpus), "--text", str(held))
    asked = {row["query"]: row["choices"][row["gold"]] for row in found["facts"]}
    for land, city in capitals.items():
        assert asked[f"city of {land} is"] == city
    assert not any(query.endswith("follows it was") for query in asked)
    for row in found["cloze"]:
        query, right = row["query"], row["choices"][row["gold"]]
        assert f"{query} {right}" in held.read_text() and len(set(row["choices"])) == 4


def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.txt").write_text("one two")
    for argv, reason in (
        (["--text", str(tmp_path / "few.txt")], "--text has too little text for a cloze"),
        (["--corpus", str(tmp_path / "few.txt")], "--corpus repeats too few words for facts"),
        (["--corpus", str(tmp_path / "none.txt")], "none.txt does not exist"),
        (["--rows", "1"], "--rows must be at least 2"),
        (["--embedded", "--text", "x.txt"], "--embedded is in place of"),
    ):
        assert make_tasks.main([str(tmp_path / "out"), *argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith("make_tasks: ") and reason in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert make_tasks.main([str(tmp_path / "out")]) == 0
    assert make_tasks.main([str(tmp_path / "out")]) == 2
    assert "arithmetic.jsonl exists: delete it" in capsys.readouterr().err
