"""scripts/timeline.py: what ran under what, from traces made here."""

import gzip
import json
from pathlib import Path

import pytest

from scripts.timeline import Event, main, read, table, union, without

PUSH = "kernel_cutlass_kernel_kernelssm90pushPushKernel_object_at__"
FC1 = "kernel_cutlass_kernel_kernelssm90fc1_actFc1Kernel_object_at__Copy_Atom"


def written(path: Path, *events: tuple[str, float, float, int]) -> Path:
    records = [
        {"ph": "X", "cat": "kernel", "name": n, "ts": 5000 + b, "dur": d, "args": {"stream": s}}
        for n, b, d, s in events
    ]
    records.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1})
    text = json.dumps({"traceEvents": records})
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)
    return path


def test_time_alone_is_what_nothing_else_covers() -> None:
    some = union([Event(0, 10, 1, ""), Event(8, 20, 1, ""), Event(30, 40, 1, "")])
    assert some == [(0, 20), (30, 40)]
    assert without(some, []) == 30
    assert without(some, [(5, 8), (15, 35)]) == 30 - 3 - 5 - 5
    assert without(some, [(0, 100)]) == 0


def test_an_exchange_under_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(
        tmp_path / "trace_1_1.json.gz",
        (PUSH, 0, 1000, 2),
        (FC1, 250, 1750, 1),
        ("nvjet_tst_192x192", 3000, 1200, 1),
    )
    assert main([str(trace), "--top", "2"]) == 0
    said = capsys.readouterr().out
    assert "4.20 ms, the GPU idle in 1.00 ms" in said
    rows = {line[:12].strip(): line[12:].split() for line in said.splitlines() if line}
    assert rows["exchange"] == ["1.00", "0.25", "1"]
    assert rows["experts"] == ["1.75", "1.00", "1"]
    assert rows["GEMM"] == ["1.20", "1.20", "1"]
    assert "kernels.sm90 Fc1Kernel" in said and "PushKernel" not in said


def test_a_window_is_cropped_read_again_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = written(tmp_path / "t.json", (PUSH, 0, 10, 2), (FC1, 2000, 10, 1), (FC1, 9000, 1, 1))
    crop, picture = tmp_path / "crop.json", tmp_path / "picture.png"
    given = [str(trace), "--window", "1", "3", "--crop", str(crop), "--plot", str(picture)]
    assert main(given) == 0
    assert read(crop) == [Event(0, 10, 1, FC1)]
    assert picture.stat().st_size > 1000
    assert table(read(crop), 1).startswith("0.01 ms")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("none.json", None, "No such file"),
        ("text.json", "hello", "no trace of torch.profiler"),
        ("empty.json", '{"traceEvents": []}', "no GPU kernels"),
    ],
)
def test_bad_input_is_one_line(
    name: str, text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
