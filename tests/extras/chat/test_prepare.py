"""prepare_data.py writes chats and pairs as tokens and a loss mask, and says what it leaves out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer

from phalanx.extras.chat.masks import BEGINS, COUNTS
from phalanx.moe.data.token_files import Sidecar
from phalanx.scripts import prepare_data
from tests.extras.chat.chats import CHATS, END, MARKED, PLAIN, chat, prepare, write_rows

Rows = list[tuple[str, str]]
"""Text of each row, and of what counts in it."""


def rows_of(prefix: str) -> Rows:
    tokenizer = Tokenizer.from_file(f"{prefix}.tokenizer.json")
    ids = np.fromfile(f"{prefix}.bin", np.uint16)
    flags = np.fromfile(f"{prefix}.mask.bin", np.uint8)
    assert len(ids) == len(flags)
    number = np.cumsum(flags & BEGINS != 0)
    found = []
    for row in range(1, number[-1] + 1):
        inside, counted = number == row, flags & COUNTS != 0
        # Padding follows the last row of a sequence, and never counts.
        text = tokenizer.decode(ids[inside].tolist(), False)
        found.append((text, tokenizer.decode(ids[inside & counted].tolist(), False)))
    return found


def rendered(messages: list[dict[str, Any]]) -> str:
    return "".join(f"<|{m['role']}|>\n{m['content']}{END}\n" for m in messages)


def test_chats_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": messages} for messages in CHATS * 3]
    prefix = prepare(tmp_path, "chats", rows)
    said = capsys.readouterr().out.splitlines()
    found = {text.replace(END * 2, "").rstrip(END): counted for text, counted in rows_of(prefix)}
    for messages in CHATS:
        answers = "".join(m["content"] + END for m in messages if m["role"] == "assistant")
        (of_row,) = [c for text, c in found.items() if text.startswith(rendered(messages)[:-9])]
        assert of_row == answers
    sidecar = Sidecar.read(Path(f"{prefix}.json"))
    ids = np.fromfile(f"{prefix}.bin", np.uint16)
    flags = np.fromfile(f"{prefix}.mask.bin", np.uint8)
    assert sidecar.packed == 64 and sidecar.labels == int((flags & COUNTS).sum())
    assert sidecar.eod == Tokenizer.from_file(f"{prefix}.tokenizer.json").token_to_id(END)
    assert said[-1].startswith(f"9 rows in {len(ids) // 64} sequences of 64 tokens, ")
    share = f"{sidecar.labels / len(ids):.1%}"
    assert said[-1].endswith(f"; {sidecar.labels} of {len(ids)} tokens count ({share})")
    assert Path(f"{prefix}.chat_template.jinja").read_text() == PLAIN
    # Megatron-Core reads both as they are.
    for name, values in ((prefix, ids), (f"{prefix}.mask", flags)):
        dataset = IndexedDataset(name)
        assert set(dataset.sequence_lengths.tolist()) == {64}
        assert np.array_equal(np.concatenate([dataset[i] for i in range(len(dataset))]), values)


def test_pairs_come_back(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Capital of France?", "completion": " Paris"},
        {"prompt": "1 + 1 = ", "response": "2"},
        {"prompt": "", "completion": "spells <|end|>"},
    ]
    prefix = prepare(tmp_path, "pairs", rows, "--rows", "pairs", "--eod", "<|endoftext|>")
    found = sorted((text.split("<|endoftext|>")[0], counted) for text, counted in rows_of(prefix))
    assert [text for text, _ in found] == [
        "1 + 1 = 2", "Capital of France? Paris", "spells <|end|>",
    ]  # fmt: skip
    # The first token of a row is predicted by nothing.
    assert [counted for _, counted in found] == [
        "2<|endoftext|>", " Paris<|endoftext|>", "pells <|end|><|endoftext|>",
    ]  # fmt: skip
    ids = np.fromfile(f"{prefix}.bin", np.uint16)
    end = Tokenizer.from_file(f"{prefix}.tokenizer.json").token_to_id(END)
    assert end not in ids  # a text that spells a token is text


def test_pairs_of_bytes(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "cd"}] * 3)
    options = ["--rows", "pairs", "--bytes", "--sequence-length", "8", "--workers", "1"]
    assert prepare_data.main([str(file), *options, "--output", str(tmp_path / "a")]) == 0
    assert np.fromfile(tmp_path / "a.bin", np.uint16).tolist() == [*b"abcd\0\0\0\0"] * 3
    assert (tmp_path / "a.mask.bin").read_bytes() == bytes([2, 0, 1, 1, 1, 0, 0, 0]) * 3


@pytest.mark.parametrize("workers", [1, 3])
def test_the_output_does_not_depend_on_workers(tmp_path: Path, workers: int) -> None:
    rows = [{"messages": CHATS[i % 3]} for i in range(30)]
    one = prepare(tmp_path, "one", rows)
    other = prepare(tmp_path, "other", rows, "--workers", workers, "--chunk-mb", "0.001")
    for end in ("bin", "idx", "mask.bin", "mask.idx"):
        assert Path(f"{one}.{end}").read_bytes() == Path(f"{other}.{end}").read_bytes()


def test_long_rows_are_cut_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"messages": chat("a", "b")},
        {"messages": chat("a", "x" * 50)},
        {"messages": chat("x" * 50, "b")},
    ]
    prefix = prepare(tmp_path, "drop", rows, "--sequence-length", 24)
    said = "rows longer than a sequence: {} cut, {} left out (--long)"
    assert capsys.readouterr().out.splitlines()[-1] == said.format(0, 2)
    assert len(rows_of(prefix)) == 1
    prefix = prepare(tmp_path, "cut", rows, "--sequence-length", 24, "--long", "cut")
    # Of the last row nothing that counts would be left.
    assert capsys.readouterr().out.splitlines()[-1] == said.format(1, 1)
    assert {counted[:3] for _, counted in rows_of(prefix)} == {"b<|", "xxx"}
    with pytest.raises(AssertionError):
        prepare(tmp_path, "none", rows[1:], "--sequence-length", 24)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "prepare_data: the inputs hold no text; rows skipped: 0 empty, 0 without tokens; "
        + said.format(0, 2)
    )


def test_the_template_is_part_of_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": CHATS[0]}]
    prefix = prepare(tmp_path, "a", rows)
    prepare(tmp_path, "a", rows)
    assert "complete already" in capsys.readouterr().out
    (tmp_path / "marked.jinja").write_text(MARKED)
    again = [str(tmp_path / "a.jsonl"), "--rows", "messages", "--output", prefix]
    again += ["--tokenizer", str(tmp_path / "tokenizer"), "--eod", END, "--workers", "1"]
    again += ["--sequence-length", "64", "--chat-template", str(tmp_path / "marked.jinja")]
    assert prepare_data.main(again) == 1
    assert "exists, of other inputs or options" in capsys.readouterr().err
    assert prepare_data.main([*again, "--overwrite"]) == 0
    assert Path(f"{prefix}.chat_template.jinja").read_text() == MARKED
    text = write_rows(tmp_path / "text.jsonl", [{"text": "no chat"}])
    plain = [str(text), "--bytes", "--output", prefix, "--workers", "1", "--overwrite"]
    assert prepare_data.main(plain) == 0
    for end in ("mask.bin", "mask.idx", "chat_template.jinja"):
        assert not Path(f"{prefix}.{end}").exists()


BROKEN: dict[str, dict[str, Any]] = {
    "no turn of the assistant": {"messages": chat("a")},
    "no list 'messages': the row has text": {"text": "a"},
    "no list 'messages': the row has messages": {"messages": "a"},
    "message 1 has no role": {"messages": [{"content": "a"}, *chat("b", "c")]},
    "message 2 has no role": {"messages": [*chat("a"), {"role": None, "content": "b"}]},
    "the special token '<|user|>' in a message: --special-text special makes it a token": {
        "messages": chat("a<|user|>", "b")
    },
    "no token of an answer counts but the one that ends it": {"messages": chat("a", "", "b", "")},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_row_that_cannot_be_used_is_named(
    reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": CHATS[0]}, BROKEN[reason]]
    with pytest.raises(AssertionError):
        prepare(tmp_path, "a", rows)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("prepare_data:")]
    file = tmp_path / "a.jsonl"
    assert line == (
        f"prepare_data: {file}:2: {reason}; fix it, or leave such rows out with --skip-bad N"
    )
    prefix = prepare(tmp_path, "a", rows, "--skip-bad", "50%")
    assert len(rows_of(prefix)) == 1
    prepare(tmp_path, "a", rows, "--skip-bad", "50%")
    assert "complete already" in capsys.readouterr().out
    assert Path(f"{prefix}.bad_rows.tsv").read_text() == f"{file}:2\t{reason}\n"


@pytest.mark.parametrize("key", ["completion", "response"])
def test_a_pair_with_an_empty_answer_is_named(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a", key: "b"}, {"prompt": "c", key: ""}, {"prompt": "d", key: " "}]
    options = ["--rows", "pairs", "--eod", "<|endoftext|>"]
    with pytest.raises(AssertionError):
        prepare(tmp_path, "a", rows, *options)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("prepare_data:")]
    reason = "no token of an answer counts but the one that ends it"
    assert line.startswith(f"prepare_data: {tmp_path / 'a.jsonl'}:2: {reason}; ")
    prefix = prepare(tmp_path, "a", rows, *options, "--skip-bad", "1")
    assert {counted for _, counted in rows_of(prefix)} == {"b<|endoftext|>", " <|endoftext|>"}


def test_special_tokens_of_messages_may_be_meant(tmp_path: Path) -> None:
    rows = [{"messages": chat("a<|user|>", "b")}]
    prefix = prepare(tmp_path, "a", rows, "--special-text", "special")
    ids = np.fromfile(f"{prefix}.bin", np.uint16).tolist()
    assert ids.count(Tokenizer.from_file(f"{prefix}.tokenizer.json").token_to_id("<|user|>")) == 2


def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"messages": CHATS[0]}])
    (tmp_path / "a.txt").write_text("text")
    template = tmp_path / "chat.jinja"
    template.write_text(PLAIN)
    prefix = prepare(tmp_path, "b", [{"messages": CHATS[0]}])
    by = ["--tokenizer", f"{prefix}.tokenizer.json", "--eod", END]
    size = ["--sequence-length", "64"]
    chats = [*by, "--rows", "messages"]

    def said(*options: object) -> str:
        capsys.readouterr()
        given = [str(tmp_path / "out"), *map(str, options)]
        assert prepare_data.main(["--output", *given]) == 1
        assert not list(tmp_path.glob("out*"))
        return capsys.readouterr().err.removeprefix("prepare_data: ")

    assert said(file, *chats).startswith("--rows messages needs --sequence-length N, above 1: ")
    assert said(file, *chats, *size).startswith("there is no chat template beside ")
    assert said(file, *by, *size) == (
        "--chat-template and --sequence-length are for --rows messages or pairs\n"
    )
    assert said(file, "--bytes", "--rows", "messages", *size).startswith(
        "--rows messages needs --tokenizer: "
    )
    more = [*chats, *size, "--chat-template", template]
    assert said(file, *more, "--key", "x").startswith("--key and --lines are for --rows text; ")
    assert said(tmp_path / "a.txt", *more) == (
        f"{tmp_path / 'a.txt'} has no JSON objects, which --rows messages reads\n"
    )
    assert said(file, *by, "--rows", "pairs", *size, "--chat-template", template).startswith(
        "--chat-template is for --rows messages; "
    )
    array = tmp_path / "numbers.json"
    array.write_text(json.dumps([1, 2]))
    assert f"{array}:1: no JSON object; fix it" in said(array, *more)
