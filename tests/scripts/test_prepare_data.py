"""prepare_data: the text comes back from .bin/.idx, whatever the workers, cuts and kills."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from phalanx.configs.schema import Config, DataConfig
from phalanx.moe.data.documents import make_shards
from phalanx.moe.data.loader import build_datasets
from phalanx.moe.data.text_rows import Reading, read
from phalanx.moe.data.token_files import open_corpus
from phalanx.scripts import prepare_data

SCRIPT = Path(prepare_data.__file__)
WORDS = [
    "routed",
    "experts",
    "see",
    "tokens",
    "straße",
    "数据",
    "🙂",
    "end\nof line",
    "\ttab",
    "x" * 40,
]


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Byte-level BPE; its file asks for truncation and padding, which must not be applied."""
    results = Tokenizer(models.BPE())
    results.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    results.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<pad>", "<eod>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    results.train_from_iterator(make_texts(50, seed=1), trainer)
    results.enable_truncation(8)
    results.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    results.save(str(path))
    return str(path)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return path


def run(output: Path, *args: object) -> int:
    return prepare_data.main([*map(str, args), "--output", str(output), "--workers", "1"])


def with_tokenizer(tokenizer: str) -> list[str]:
    return ["--tokenizer", tokenizer, "--eod", "<eod>"]


def documents(prefix: Path) -> list[np.ndarray]:
    open_corpus(str(prefix))
    results = IndexedDataset(str(prefix))
    assert np.array_equal(results.document_indices, np.arange(len(results) + 1))
    return [results[i].copy() for i in range(len(results))]


def content(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def left_over(folder: Path, name: str = "out") -> list[str]:
    return sorted(path.name for path in folder.glob(f"{name}.*"))


def decoded(prefix: Path, tokenizer: str) -> list[str]:
    reader = Tokenizer.from_file(tokenizer)
    eod = reader.token_to_id("<eod>")
    ids = documents(prefix)
    assert all(document[-1] == eod for document in ids)
    return [reader.decode(list(document[:-1]), skip_special_tokens=False) for document in ids]


def as_jsonl(folder: Path, texts: list[str]) -> list[object]:
    half = len(texts) // 2
    files = [write_jsonl(folder / "1.jsonl", texts[:half]), folder / "2.jsonl"]
    write_jsonl(files[1], texts[half:])
    files[1].write_bytes(b"\n" + files[1].read_bytes().rstrip(b"\n"))
    return [*files]


def as_files(folder: Path, texts: list[str]) -> list[object]:
    for i, text in enumerate(texts):
        (folder / f"{i // 20}").mkdir(exist_ok=True)
        (folder / f"{i // 20}" / f"{i:03d}.txt").write_bytes(text.encode())
    return [folder]


def as_lines(folder: Path, texts: list[str]) -> list[object]:
    texts[:] = [text.replace("\n", "") for text in texts]
    (folder / "all.txt").write_bytes("\r\n\n".join(texts).encode())
    return [folder / "all.txt", "--lines"]


def as_parquet(folder: Path, texts: list[str]) -> list[object]:
    values: list[str | None] = [*texts[:5], None, "", *texts[5:]]
    table = pa.table({"n": range(len(values)), "body": values})
    parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    return [folder / "a.parquet", "--key", "body"]


@pytest.mark.parametrize("form", [as_jsonl, as_files, as_lines, as_parquet])
def test_the_text_comes_back(
    tmp_path: Path, tokenizer: str, form: Callable[[Path, list[str]], list[object]]
) -> None:
    (tmp_path / "in").mkdir()
    texts = make_texts(40)
    args = form(tmp_path / "in", texts)
    assert run(tmp_path / "out", *args, *with_tokenizer(tokenizer), "--chunk-mb", 0.002) == 0
    assert decoded(tmp_path / "out", tokenizer) == texts
    assert left_over(tmp_path) == ["out.bin", "out.idx", "out.json", "out.tokenizer.json"]
    assert (tmp_path / "out.tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()
    described = open_corpus(str(tmp_path / "out")).sidecar
    assert described is not None
    expected = (Tokenizer.from_file(tokenizer).get_vocab_size(), "uint16", 40)
    assert (described.vocab_size, described.dtype, described.documents) == expected
    assert run(tmp_path / "out", *args, "--bytes", "--overwrite") == 0
    assert left_over(tmp_path) == ["out.bin", "out.idx", "out.json"]  # which know no tokenizer


def test_bytes_can_be_trained_on(tmp_path: Path) -> None:
    texts = make_texts(40)
    path = write_jsonl(tmp_path / "a.jsonl", ["", *texts])
    assert run(tmp_path / "out", path, "--bytes") == 0
    results = documents(tmp_path / "out")
    assert [bytes(d.astype(np.uint8)) for d in results] == [t.encode() + b"\0" for t in texts]
    data = DataConfig(source="indexed", blend=[str(tmp_path / "out")], cache=str(tmp_path / "c"))
    train, _ = build_datasets(Config(data=data), 256, 8, 0)
    assert train[7].shape == (data.sequence_length + 1,)


def test_large_vocabularies_take_four_bytes(tmp_path: Path, tokenizer: str) -> None:
    grown = Tokenizer.from_file(tokenizer)
    grown.add_tokens([f"added{i}" for i in range(70_000)])
    grown.save(str(tmp_path / "tokenizer.json"))
    path = write_jsonl(tmp_path / "a.jsonl", ["see added69999", "tokens"])
    assert run(tmp_path / "out", path, *with_tokenizer(str(tmp_path))) == 0
    results = documents(tmp_path / "out")
    assert results[0].dtype == np.int32 and grown.token_to_id("added69999") in results[0]


def test_workers_and_cuts_do_not_change_the_result(tmp_path: Path, tokenizer: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(120))
    for name, megabytes in (("whole", 32), ("cut", 0.003), ("tiny", 0.0002)):
        args = [path, *with_tokenizer(tokenizer), "--chunk-mb", megabytes]
        assert run(tmp_path / name, *args) == 0
    command = [sys.executable, SCRIPT, path, *with_tokenizer(tokenizer), "--chunk-mb", "0.003"]
    command += ["--workers", "2", "--output", "parallel"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert "120 documents" in finished.stdout and finished.stderr == ""
    assert len({content(tmp_path / n) for n in ("whole", "cut", "tiny", "parallel")}) == 1


def test_rows_without_tokens_are_left_out_and_counted(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture
) -> None:
    """Like Megatron-LM's preprocess_data.py; a document of one end token teaches nothing."""
    stripped = Tokenizer.from_file(tokenizer)
    stripped.normalizer = normalizers.Strip()
    stripped.save(str(tmp_path / "tokenizer.json"))
    texts = ["routed experts", "", "   ", "数据 see tokens", "\n \t", "see"]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    args = [path, *with_tokenizer(str(tmp_path)), "--chunk-mb", 0.00003]
    assert run(tmp_path / "out", *args) == 0
    kept = ["routed experts", "数据 see tokens", "see"]
    assert decoded(tmp_path / "out", str(tmp_path / "tokenizer.json")) == kept
    assert "3 documents" in (out := capsys.readouterr().out)
    assert "rows skipped: 1 empty, 2 without tokens" in out
    described = open_corpus(str(tmp_path / "out")).sidecar
    assert described is not None and described.skipped == 3
    assert described.text_bytes == sum(len(text.encode()) for text in kept)
    assert run(tmp_path / "none", lines(tmp_path, '{"text": " "}'), *args[1:]) == 1
    error = capsys.readouterr().err
    assert "the inputs hold no text; rows skipped: 0 empty, 1 without tokens" in error
    assert left_over(tmp_path, "none") == []


def test_neither_the_command_nor_its_workers_import_torch(tmp_path: Path) -> None:
    """It takes seconds, and warns of a missing GPU."""
    for name in ("torch", "megatron"):
        (tmp_path / "poison" / name).mkdir(parents=True)
        (tmp_path / "poison" / name / "__init__.py").write_text("raise SystemExit('imported')")
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(30))
    command = [sys.executable, SCRIPT, path, "--bytes", "--chunk-mb", "0.003", "--workers", "2"]
    finished = subprocess.run(
        [*command, "--output", "out"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "poison")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert "30 documents" in finished.stdout and len(documents(tmp_path / "out")) == 30


def test_every_line_is_in_one_piece_wherever_the_cuts_fall(tmp_path: Path) -> None:
    expected = [f"line {i}" for i in range(4)]
    (tmp_path / "a.txt").write_text("\n".join(expected) + "\n")
    lines = Reading(lines=True)
    for chunk in range(1, 40):
        shards = make_shards([str(tmp_path / "a.txt")], lines, chunk)
        actual = [text for shard in shards for piece in shard.pieces for text in read(piece, lines)]
        assert actual == expected


def test_a_killed_run_continues(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(60))
    args = [path, *with_tokenizer(tokenizer), "--chunk-mb", 0.003]
    assert run(tmp_path / "expected", *args) == 0

    written: list[int] = []
    original = prepare_data.write_shard

    def counting(shard: prepare_data.Shard, *rest: object) -> int:
        written.append(shard.number)
        return original(shard, *rest)

    monkeypatch.setattr(prepare_data, "write_shard", counting)
    child = os.fork()
    if child == 0:

        def dies(*_: object) -> None:
            if len(written) == 3:  # in the middle of the third shard
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr("phalanx.moe.data.documents.sync", dies)
        run(tmp_path / "out", *args)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert left_over(tmp_path) == ["out.parts"]

    assert run(tmp_path / "out", path, *with_tokenizer(tokenizer), "--chunk-mb", 0.004) == 1
    assert "run with other inputs or options" in capsys.readouterr().err
    assert run(tmp_path / "out", *args) == 0
    assert written[0] == 2 and "continuing: 2 of" in capsys.readouterr().out
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    assert left_over(tmp_path) == ["out.bin", "out.idx", "out.json", "out.tokenizer.json"]


def test_a_finished_run_is_not_repeated_or_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(10))
    assert run(tmp_path / "out", path, "--bytes") == 0
    first = content(tmp_path / "out")
    assert run(tmp_path / "out", path, "--bytes") == 0
    assert "complete already" in capsys.readouterr().out
    write_jsonl(path, make_texts(11))
    assert run(tmp_path / "out", path, "--bytes") == 1
    assert "out.json exists" in capsys.readouterr().err and content(tmp_path / "out") == first
    assert run(tmp_path / "out", path, "--bytes", "--overwrite") == 0
    assert len(documents(tmp_path / "out")) == 11


def test_a_crash_between_the_renames_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(10))
    assert run(tmp_path / "expected", path, "--bytes") == 0
    original = os.replace

    def full(source: object, target: object) -> None:
        if str(target).endswith("out.idx"):
            raise OSError(28, "No space left on device", str(target))
        original(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert run(tmp_path / "out", path, "--bytes") == 1
    monkeypatch.undo()
    assert run(tmp_path / "out", path, "--bytes") == 0
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def bad_json(folder: Path) -> list[object]:
    path = write_jsonl(folder / "a.jsonl", make_texts(30))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:20], '{"text": "cut', *lines[20:]]))
    return [path, "--bytes", "--chunk-mb", "0.001"]


def bad_utf8(folder: Path) -> list[object]:
    (folder / "a.txt").write_bytes(b"fine\nb\xffd\n")
    return [folder / "a.txt", "--bytes", "--lines"]


def bad_parquet(folder: Path) -> list[object]:
    parquet.write_table(pa.table({"text": [1, 2]}), folder / "a.parquet")
    return [folder / "a.parquet", "--bytes"]


def lines(folder: Path, *content: str) -> Path:
    (folder / "a.jsonl").write_text("\n".join(content))
    return folder / "a.jsonl"


def touch(path: Path) -> Path:
    path.write_text("x")
    return path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (bad_json, "a.jsonl:21: not JSON"),
        (lambda f: [lines(f, '{"text": ""}', '{"a": 1}'), "--bytes"], "a.jsonl:2: no key 'text'"),
        (lambda f: [lines(f, '{"text": 5}'), "--bytes"], "a.jsonl:1: 'text' is int"),
        (lambda f: [lines(f, '{"text": "\\ud83d"}'), "--bytes"], "a.jsonl:1: 'text' has half of a"),
        (lambda f: [lines(f, "[1]"), "--bytes"], "a.jsonl:1: no key 'text'"),
        (bad_utf8, "a.txt:2: not UTF-8 at byte 1"),
        (bad_parquet, "a.parquet: column 'text' is int"),
        (lambda f: [*bad_parquet(f), "--key", "body"], "no column 'body' (columns: text)"),
        (lambda f: [touch(f / "b.parquet"), "--bytes"], "b.parquet is not a Parquet file"),
        (lambda f: [lines(f, '{"text": ""}'), "--bytes"], "the inputs hold no text"),
        (lambda f: [lines(f), "--bytes"], "the inputs hold no text"),
        (lambda f: [f / "none.jsonl", "--bytes"], "none.jsonl does not exist"),
        (lambda f: [touch(f / "a.csv"), "--bytes"], "a.csv is none of .jsonl"),
        (lambda f: [f, "--bytes"], "holds no .jsonl, .json, .txt (or .gz, .zst of these)"),
        (lambda f: [lines(f, "{}"), "--tokenizer", f / "no.json"], "no.json does not exist"),
        (lambda f: [lines(f, "{}"), "--tokenizer", touch(f / "t.json")], "t.json is not a token"),
        (lambda f: [lines(f, "{}"), "--tokenizer", "{t}"], "--eod is needed.*<eod>, <pad>"),
        (lambda f: [lines(f, "{}"), "--tokenizer", "{t}", "--eod", "no"], "no is not a token"),
        (lambda f: [lines(f, "{}"), "--bytes", "--eod", "x"], "--eod is for --tokenizer"),
        (lambda f: [lines(f, "{}"), "--bytes", "--chunk-mb", 0], "must be positive"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    tokenizer: str,
    capsys: pytest.CaptureFixture,
    args: Callable[[Path], list[object]],
    message: str,
) -> None:
    given = [tokenizer if arg == "{t}" else arg for arg in args(tmp_path)]
    assert run(tmp_path / "out", *given) == 1
    reported = [line for line in capsys.readouterr().err.splitlines() if "prepare_data:" in line]
    assert len(reported) == 1
    assert all(part in reported[0] for part in message.split(".*"))
    assert left_over(tmp_path) == []


def test_once_the_input_is_mended_the_same_command_works(tmp_path: Path) -> None:
    args = bad_json(tmp_path)
    assert run(tmp_path / "out", *args) == 1
    write_jsonl(tmp_path / "a.jsonl", make_texts(30))
    assert run(tmp_path / "out", *args) == 0
    assert len(documents(tmp_path / "out")) == 30


def test_a_killed_worker_leaves_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    args = [write_jsonl(tmp_path / "a.jsonl", make_texts(30)), "--bytes", "--chunk-mb", 0.003]
    original = prepare_data.write_shard

    def second_dies(shard: prepare_data.Shard, *rest: Any) -> int:
        if shard.number == 1:
            raise BrokenProcessPool
        return original(shard, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "write_shard", second_dies)
        assert run(tmp_path / "out", *args) == 1
    assert "a worker was killed" in capsys.readouterr().err
    assert left_over(tmp_path) == ["out.parts"]
    assert run(tmp_path / "out", *args) == 0
    assert "continuing: 1 of" in capsys.readouterr().out


def test_an_unwritable_output_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = lines(tmp_path, '{"text": "a"}')
    assert run(path / "out", path, "--bytes") == 1
    assert f"--output: {path / 'out'}.parts cannot be written" in capsys.readouterr().err


def test_an_error_in_a_worker_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, *bad_json(tmp_path), "--workers", "2", "--output", "out"]
    command = [str(part) for part in command]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 1
    assert "a.jsonl:21: not JSON" in finished.stderr and "Traceback" not in finished.stderr
