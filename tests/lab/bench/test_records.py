"""Records of benchmarks: file, table and verdicts."""

import json
from pathlib import Path

import pytest

from phalanx.scripts.lab import bench_kernels
from phalanx.scripts.lab.bench import records
from phalanx.scripts.lab.bench.records import Record, Report

MEASURED = Path(__file__).resolve().parents[3] / "docs/measured/kernels"
NAMES = [p.name for p in MEASURED.glob("*.json") if p.read_text("utf-8").startswith('{"facts"')]


def test_json_has_all_fields_and_a_line_per_record(tmp_path: Path) -> None:
    written = [
        Record("mlp", (1, 2), "ours", "forward", "eager", 1.25, 1, 1.5, 600.5, 1.1, 1.0, 1.2),
        Record("mlp", (1, 2), "te", "", "eager", note="not installed", failed=True),
        Record("wire", (1,), "a", "b", ms=2.0, gbs=330.0, ranks=(1.5, 2.0)),
    ]
    path = tmp_path / "runs" / "a.json"
    records.write(path, {"device": "H200"}, written)
    assert records.read(path) == ({"device": "H200"}, written)
    assert len(path.read_text().splitlines()) == 6
    first, second, third = json.loads(path.read_text())["records"]
    assert first["met"] is True and first["pass"] == "forward"
    assert third["gbs"] == 330 and third["ranks"] == [1.5, 2.0]
    assert not {"gbs", "ranks", "ratio"} & set(second)
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a file of this script"):
        records.read(path)


@pytest.mark.parametrize("name", NAMES)
def test_records_of_docs_are_read_and_would_be_written_so(name: str) -> None:
    text = (MEASURED / name).read_text("utf-8")
    run_facts, made = records.read(MEASURED / name)
    assert made and {"device", "before"} <= run_facts.keys()
    assert json.loads(records.to_json(run_facts, made)) == json.loads(text)


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "a.json"
    with pytest.raises(SystemExit, match=f"--json {path} cannot be written: "):
        Report(path, {"device": "CPU"}).start()
    Report(tmp_path / "new" / "a.json", {"device": "CPU"}).start()
    assert not list((tmp_path / "new").iterdir())


def test_verdicts_and_table() -> None:
    def judged(ratio: float) -> Record:
        return Record("mlp", (8, 4), "ours", "forward", ms=2.0, ratio=ratio, bar=1.1, goal=1.3)

    assert [judged(r).verdict for r in (1.05, 1.1, 1.3)] == ["missed", "met", "goal"]
    text = records.table([judged(1.2), Record("host", (1,), "x", "y", note="why", failed=True)])
    lines = text.splitlines()
    assert lines[1] == "mlp 8,4" and "2.0000" in lines[3] and lines[3].endswith("met")
    assert lines[-1].endswith("FAILED  why")
    assert "400 GB/s" in records.table([Record("wire", (1,), "a", "b", ms=1.0, gbs=400.0)])
    assert records.summary([judged(1.2), judged(1.0)]) == "1 of 2 bars met, 1 missed, 0 failures"


def test_earlier_results_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    records.write(path, {}, [Record("mlp", (8,), "ours", "forward", ms=1.0, ratio=1.2, bar=1.1)])
    assert bench_kernels.main(["--from-json", str(path)]) == 0
    assert "mlp 8" in capsys.readouterr().out
    assert bench_kernels.main(["--from-json", str(tmp_path / "none.json")]) == 1
