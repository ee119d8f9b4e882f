"""prepare_data --skip-bad: broken rows are left out, counted and listed, wherever the cuts fall."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.moe.data.token_files import open_corpus
from tests.scripts.test_prepare_data import SCRIPT, content, left_over, run

BAD = {
    3: (b'{"text": "cut', "not JSON: Unterminated string"),
    4: (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
    11: (b'{"body": "x"}', "no key 'text' (keys: body); give --key"),
    20: (b'{"text": 5}', "'text' is int, not text"),
    29: (b'{"text": "\\ud83d"}', "'text' has half of a surrogate pair at character 0"),
    30: (b'{"n": ' + b"9" * 5000, "not JSON: Exceeds the limit"),
}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """40 rows, six of them broken, and a blank line."""
    rows = [json.dumps({"text": f"row {i} of experts"}).encode() for i in range(1, 41)]
    for number, (raw, _) in BAD.items():
        rows[number - 1] = raw
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*rows[:9], b"", *rows[10:]]))
    return path


def positions(prefix: Path) -> list[list[str]]:
    return [line.split("\t") for line in Path(f"{prefix}.bad_rows.tsv").read_text().splitlines()]


def test_bad_rows_are_left_out_counted_and_listed(
    tmp_path: Path, broken: Path, capsys: pytest.CaptureFixture
) -> None:
    full_run = tmp_path / "whole.jsonl"
    kept = [line for i, line in enumerate(broken.read_bytes().split(b"\n"), 1) if i not in BAD]
    full_run.write_bytes(b"\n".join(kept))
    assert run(tmp_path / "whole", full_run, "--bytes") == 0
    for name, how in (
        ("all", ["--skip-bad", 6]),
        ("cut", ["--skip-bad", 6, "--chunk-mb", 0.0003]),
        ("share", ["--skip-bad", "15.5%", "--chunk-mb", 0.001]),  # 6 of 39
    ):
        capsys.readouterr()
        assert run(tmp_path / name, broken, "--bytes", *how) == 0
        assert content(tmp_path / name) == content(tmp_path / "whole")
        actual = positions(tmp_path / name)
        assert [place for place, _ in actual] == [f"{broken}:{number}" for number in BAD]
        for (_, reported), (_, expected) in zip(actual, BAD.values(), strict=True):
            assert reported.startswith(expected)
        described = open_corpus(str(tmp_path / name)).sidecar
        assert described is not None and (described.bad_rows, described.skipped) == (6, 6)
        out = capsys.readouterr().out
        assert "33 documents" in out and "2 bad: not JSON, 1 bad: not UTF-8, 1 bad: no key" in out
        assert f"(places: {tmp_path / name}.bad_rows.tsv)" in out


def test_more_than_the_limit_stops_and_a_higher_one_goes_on(
    tmp_path: Path, broken: Path, capsys: pytest.CaptureFixture
) -> None:
    for limit, reported in (
        (1, "2 bad rows are more than --skip-bad 1: "),
        ("15%", "6 bad rows of 39 are more than --skip-bad 15%: 2 not JSON (first "),
    ):
        args = [broken, "--bytes", "--chunk-mb", 0.0005]
        assert run(tmp_path / "out", *args, "--skip-bad", limit) == 1
        lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("prepare_data:")]
        assert len(lines) == 1 and reported in lines[0]
        assert f"{broken}:3)" in lines[0] and "continue with a higher --skip-bad" in lines[0]
        assert left_over(tmp_path) == ["out.parts"]
    assert run(tmp_path / "out", *args, "--skip-bad", 6) == 0
    assert "continuing: " in capsys.readouterr().out
    assert [place for place, _ in positions(tmp_path / "out")] == [f"{broken}:{n}" for n in BAD]
    assert run(tmp_path / "out", *args, "--skip-bad", 100) == 0
    assert "complete already" in capsys.readouterr().out
    assert run(tmp_path / "out", *args) == 1
    assert "was made without 6 bad rows, more than --skip-bad 0" in capsys.readouterr().err


def test_the_default_stops_at_the_first_and_tells_the_option(
    tmp_path: Path, broken: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run(tmp_path / "out", broken, "--bytes") == 1
    error = capsys.readouterr().err
    assert "a.jsonl:3: not JSON" in error and "leave such rows out with --skip-bad N" in error
    assert left_over(tmp_path) == []
    for wrong in ("-1", "x", "0.1", "101%", "%"):
        assert run(tmp_path / "out", broken, "--bytes", f"--skip-bad={wrong}") == 1
        assert "is neither a count, as 100, nor a share, as 0.1%" in capsys.readouterr().err


def test_several_workers_leave_out_the_same_rows(tmp_path: Path, broken: Path) -> None:
    assert run(tmp_path / "one", broken, "--bytes", "--skip-bad", 6) == 0
    command = [sys.executable, SCRIPT, broken, "--bytes", "--chunk-mb", "0.0005", "--workers", "2"]
    command = [str(word) for word in command]
    few = [*command, "--skip-bad", "2", "--output", "two"]
    finished = subprocess.run(few, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 1 and "Traceback" not in finished.stderr
    assert "bad rows are more than --skip-bad 2: " in finished.stderr
    more = [*command, "--skip-bad", "20%", "--output", "two"]
    finished = subprocess.run(more, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert positions(tmp_path / "two") == positions(tmp_path / "one")


def test_what_is_replaced_takes_its_list_along(tmp_path: Path, broken: Path) -> None:
    assert run(tmp_path / "out", broken, "--bytes", "--skip-bad", 6) == 0
    broken.write_text('{"text": "mended"}\n')
    assert run(tmp_path / "out", broken, "--bytes", "--overwrite") == 0
    assert left_over(tmp_path) == ["out.bin", "out.idx", "out.json"]


def test_an_output_never_replaces_an_input(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "wiki.json").write_text('[{"text": "a"}]')
    assert run(tmp_path / "wiki", tmp_path / "wiki.json", "--bytes", "--overwrite") == 1
    assert "would replace the input" in capsys.readouterr().err
    assert (tmp_path / "wiki.json").read_text() == '[{"text": "a"}]'


def test_kinds_of_files_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A folder of several kinds, of which one has another key; its output lies inside it."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = tmp_path / "texts"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    (folder / ".ipynb_checkpoints/a-checkpoint.txt").write_text("no text of ours")
    (folder / "README.txt").write_text("about")
    (folder / "a.JSONL").write_text('{"text": "one"}\n')
    (folder / "b.json").write_text('[{"text": "two"}]')
    parquet.write_table(pa.table({"content": ["three"]}), folder / "c.parquet")
    (folder / "d.txt").write_bytes(b"\xef\xbb\xbffour")
    args = [folder, "--bytes", "--key", "parquet=content"]
    for _ in range(2):
        assert run(folder / "out", *args) == 0
    out = capsys.readouterr().out
    assert "taken: 1 .jsonl, 1 .json, 1 .parquet, 1 .txt (0.0 MB)" in out
    assert "1 hidden (.ipynb_checkpoints/)" in out and "1 about the data (README.txt)" in out
    assert "complete already" in out
    assert bytes(open_corpus(str(folder / "out")).lengths.tolist()) == bytes([4, 4, 6, 5])
    raw = Path(f"{folder / 'out'}.bin").read_bytes()[::2]
    assert raw == b"one\0two\0three\0four\0"
