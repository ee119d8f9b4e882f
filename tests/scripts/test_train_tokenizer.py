"""train_tokenizer: merges of BPE, lossless text, a held-out share, and data that is prepared."""

import itertools
import random
import re
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer

from phalanx.moe.data.token_files import Sidecar
from phalanx.scripts import prepare_data, train_tokenizer

TEXTS = [
    "routed experts see tokens, experts see 12345 tokens",
    "straße 数据 🙂 don't we'll\n\n  indented\tlines\r\nand  more",
    "a text that spells <|endoftext|> and <|user|> inside",
    "é combining e\u0301, digits ٣٤٥, 3.14159, x=1_000",
    "\u0000 nul, \ufeff mark",
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """400 documents of words that repeat."""
    pick = random.Random(0)
    words = " ".join(TEXTS).split()
    lines = [" ".join(pick.choices(words, k=30)) for _ in range(400)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines))
    return path


def made(corpus: Path, *more: str, name: str = "made.json") -> Tokenizer:
    output = corpus.parent / name
    argv = [str(corpus), "--lines", "--output", str(output), *more]
    assert train_tokenizer.main(argv) == 0
    return Tokenizer.from_file(str(output))


def merges_of(text: str, count: int) -> list[tuple[str, str]]:
    """The first merges by the algorithm's definition: the most frequent pair, the first of equals.

    For words of ASCII letters; a space is Ġ.
    """
    words = Counter(tuple(f"{word}".replace(" ", "Ġ")) for word in re.findall(r" ?\w+", text))
    merges = []
    for _ in range(count):
        pairs = Counter[tuple[str, str]]()
        for word, number in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += number
        (best, most), *others = pairs.most_common()
        assert not others or others[0][1] < most, "a tie, which implementations break differently"
        merges.append(best)
        words = Counter({_merged(word, best): number for word, number in words.items()})
    return merges


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    found, at = list[str](), 0
    while at < len(word):
        both = word[at : at + 2] == pair
        found.append("".join(pair) if both else word[at])
        at += 1 + both
    return tuple(found)


def test_merges_are_those_of_the_definition() -> None:
    text = "abab " * 40 + "abc " * 23 + "cd " * 11 + "xcd " * 6 + "zz " * 3
    tokenizer = train_tokenizer.train([[text]], size=256 + 1 + 5, special=["<s>"], digits=3)
    words = [tokenizer.id_to_token(257 + i) for i in range(5)]
    assert words == ["".join(pair) for pair in merges_of(text, 5)]
    assert tokenizer.token_to_id("<s>") == 0


def test_text_decodes_to_itself_and_size_is_kept(corpus: Path) -> None:
    special = ["--special", "<|endoftext|>", "--special", "<|user|>"]
    tokenizer = made(corpus, "--size", "300", *special, "--held-out", "0.2")
    assert tokenizer.get_vocab_size() == 300
    assert [tokenizer.id_to_token(i) for i in (0, 1)] == ["<|endoftext|>", "<|user|>"]
    plain = train_tokenizer.TokenEncoder(tokenizer, (0,), train_tokenizer.PLAIN)
    for text, ids in zip(TEXTS, plain.encode(TEXTS), strict=True):
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
        assert not {0, 1} & {*ids.tolist()}


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_tokens_have_so_many_digits_at_most(corpus: Path, digits: int) -> None:
    with corpus.open("a") as stream:
        stream.write("\n" + "\n".join(["1234567 1234567 20252025"] * 50))
    tokenizer = made(corpus, "--size", "400", "--digits", str(digits))
    runs = [re.findall(r"\d+", token) for token in tokenizer.get_vocab()]
    assert max(len(run) for found in runs for run in found) == digits
    assert not any(re.search(r"\d\D|\D\d", token) for token in tokenizer.get_vocab() if token != "")


def test_the_result_depends_on_the_documents_alone(corpus: Path) -> None:
    first = made(corpus, "--size", "350", "--held-out", "0.3").to_str()
    lines = corpus.read_text().split("\n")
    corpus.write_text("\n".join(reversed(lines)))
    assert made(corpus, "--size", "350", "--held-out", "0.3", name="2.json").to_str() == first
    assert made(corpus, "--size", "350", "--share", "0.3", name="3.json").to_str() != first


def test_held_out_documents_are_counted_and_not_learned(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Any = types.ModuleType("tiktoken")
    by_bytes = types.SimpleNamespace(encode_ordinary=lambda text: text.encode())
    fake.get_encoding = {"bytes": by_bytes}.__getitem__
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", fake)
    made(corpus, "--size", "280", name="small.json")
    more = ["--against", str(corpus.parent / "small.json"), "--against", "bytes"]
    capsys.readouterr()
    tokenizer = made(corpus, "--size", "600", "--held-out", "0.5", *more)
    out = capsys.readouterr().out
    lines, place = corpus.read_text().split("\n"), train_tokenizer._place
    held = [text for text in lines if place(text, "hold out") < 0.5]
    size = sum(len(text.encode()) for text in held)
    assert f"held out: {len(held)} documents, {size:,} bytes" in out and 150 < len(held) < 250
    rates = [float(rate) for rate in re.findall(r"([\d.]+) bytes per token", out)]
    plain = train_tokenizer.TokenEncoder(Tokenizer.from_str(tokenizer.to_str()), (), "plain")
    tokens = sum(len(ids) for ids in plain.encode(held))
    assert rates[0] == pytest.approx(size / tokens, abs=1e-3)
    assert rates[0] > rates[1] > rates[2] == 1
    learned = [text for text in lines if text not in held]
    again = train_tokenizer.train([learned], size=600, special=["<|endoftext|>"], digits=3)
    assert again.to_str() == tokenizer.to_str()


def test_data_is_prepared_with_it(corpus: Path) -> None:
    tokenizer = made(corpus, "--size", "300")
    prefix, path = corpus.parent / "data", corpus.parent / "made.json"
    argv = [str(corpus), "--lines", "--tokenizer", str(path), "--eod", "<|endoftext|>"]
    assert prepare_data.main([*argv, "--output", str(prefix), "--workers", "1"]) == 0
    assert Sidecar.read(prefix.with_suffix(".json")).vocab_size == 300
    data = IndexedDataset(str(prefix))  # whose rows are views of its files
    text = tokenizer.decode(data[0][:-1].tolist(), skip_special_tokens=False)
    assert text == corpus.read_text().split("\n")[0]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--size", "257"], "--size 257 has no room for merges"),
        (["--size", "999", "--special", "a", "--special", "a"], "--special: 'a', 'a' must differ"),
        (["--size", "999", "--digits", "0"], "--digits 0 must be at least 1"),
        (["--size", "999", "--share", "0"], "--share 0.0 must be above 0"),
        (["--size", "999", "--held-out", "1"], "--held-out 1.0 must be at least 0 and below 1"),
        (["--size", "999", "--against", "nowhere"], "--against nowhere is no file"),
    ],
)
def test_mistakes_are_a_line(
    more: list[str], reason: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = corpus.parent / "t.json"
    assert train_tokenizer.main([str(corpus), "--output", str(output), *more]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"train_tokenizer: {reason}") and error.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize("text", ["", "\n\n", '{"text": ""}\n'])
def test_no_text_gives_no_tokenizer(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text(text)
    given = [tmp_path / "empty.jsonl", "--size", 300, "--output", tmp_path / "t.json"]
    assert train_tokenizer.main([*map(str, given)]) == 1
    assert "the inputs hold no text to learn from" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_a_file_is_not_replaced_unasked(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(corpus, "--size", "300")
    before = (corpus.parent / "made.json").read_bytes()
    argv = [str(corpus), "--lines", "--size", "310", "--output", str(corpus.parent / "made.json")]
    assert train_tokenizer.main(argv) == 1
    assert "exists; give another file, or --overwrite" in capsys.readouterr().err
    assert (corpus.parent / "made.json").read_bytes() == before
    assert train_tokenizer.main([*argv, "--overwrite"]) == 0
