"""Console lines, metrics.jsonl across kills and resumes, sinks that fail, the closing summary."""

import io
import json
import math
import re
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.configs.schema import Config
from phalanx.moe.data.sources import Source
from phalanx.moe.report import metrics as metrics_module
from phalanx.moe.report.loggers import read, start_facts
from phalanx.moe.report.metrics import Metrics, duration, heading, line, steady
from phalanx.moe.report.service import tag
from phalanx.moe.run.callbacks.validation import SourceSums, scores
from tests.parallel.surroundings import full_disk

GPU: dict[str, Any] = {
    "step": 120,
    "loss": 3.21409,
    "grad_norm": 0.8712,
    "lr": 2.9e-4,
    "tokens_per_second_per_gpu": 13402.3,
    "tflops_per_gpu": 306.9,
    "mfu": 0.3103,
    "step_time": 1.2222,
    "memory": 71.21,
    "memory_total": 139.8,
    "load_max": 1.31,
    "load_p95": 1.12,
    "dead_experts": 0,
    "reruns": 0,
}


@pytest.fixture(autouse=True)
def known_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "memory", lambda: {"memory": 1.25})


def config(**run: Any) -> Config:
    cfg = Config()
    cfg.run.steps = 100
    for name, value in run.items():
        setattr(cfg.run, name, value)
    return cfg


def make(folder: Path, step: int = 0, **run: Any) -> tuple[Metrics, io.StringIO]:
    stream = io.StringIO()
    return Metrics(folder, config(**run), True, step=step, stream=stream), stream


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0 - step / 100, "step_time": 0.5, **more}


# --- console --------------------------------------------------------------------------------------


def test_table_of_a_gpu_run() -> None:
    assert heading(GPU, 5000) == (
        "     step     loss   gnorm       lr  tok/s/gpu  TF/s    mfu  s/step    GiB  lb max"
        "   p95  dead     eta"
    )
    assert line(GPU, 5000, eta=4880 * 1.2222) == (
        " 120/5000   3.2141    0.87  2.9e-04     13,402   307  31.0%   1.222   71.2    1.31"
        "  1.12     0   1h39m"
    )


def test_table_leaves_out_what_is_unknown() -> None:
    keys = ("step", "loss", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu")
    cpu = {k: GPU[k] for k in keys} | {"memory": 1.25}
    assert heading(cpu, 200) == "   step     loss  tok/s/rank    GiB     eta"
    assert line(cpu, 200) == "120/200   3.2141      13,402    1.2"
    assert line({"step": 5, "loss": float("nan")}, 10) == " 5/10      nan"


@pytest.mark.parametrize("steps", [5, 80, 100_000])
@pytest.mark.parametrize("more", [{}, {"mtp_loss": 3.4}, {"mtp_loss": 3.4, "mfu_fp8": 0.3}])
def test_columns_stand_under_their_names(steps: int, more: dict[str, float]) -> None:
    for names in (set(GPU), set(GPU) - {"memory_total"}, {"step", "loss", "dead_experts"}):
        record = {k: v for k, v in (GPU | more | {"step": steps}).items() if k in names}
        top, row = heading(record, steps), line(record, steps, eta=59)
        assert [m.end() for m in re.finditer(r"\S+( \S+)*", top)] == [
            m.end() for m in re.finditer(r"\S+", row)
        ]
        assert len(top) <= 120


def test_the_remaining_time_counts_batches_that_grow(tmp_path: Path) -> None:
    """60 steps of 16 samples in 0.5 s, then 40 of 32 in a second each."""
    cfg, stream = config(), io.StringIO()
    cfg.data.sequence_length, cfg.data.global_batch = 256, 32
    cfg.data.batch_warmup = [f"16:{60 * 16 * 256}"]
    metrics = Metrics(tmp_path / "run", cfg, True, stream=stream)
    metrics.log(record(10, tokens=10 * 16 * 256))
    assert stream.getvalue().splitlines()[-1].endswith(" 1m05s")


def test_the_heading_returns_and_reruns_are_reported_when_they_happen(tmp_path: Path) -> None:
    metrics, stream = make(tmp_path)
    for step in range(1, 61):
        metrics.log(record(step, reruns=(step >= 3) + (step >= 40)))
    metrics.log({"step": 60, "valid_loss": 2.5})
    lines = stream.getvalue().splitlines()
    assert [n for n, text in enumerate(lines) if text.endswith(" eta")] == [0, 26, 52]
    reported = [text.split() for text in lines if "reruns" in text]
    assert [(words[0], words[-1]) for words in reported] == [("3/100", "1"), ("40/100", "2")]
    assert lines[-1] == "-- validation loss 2.5000 after step 60"


def test_a_column_that_appears_later_gets_its_heading(tmp_path: Path) -> None:
    metrics, stream = make(tmp_path)
    for step in range(1, 31):
        metrics.log(record(step, **({"max_logit": 55.04} if step % 10 == 0 else {})))
    lines = stream.getvalue().splitlines()
    headings = [n for n, text in enumerate(lines) if text.endswith(" eta")]
    assert headings == [0, 10, 27] and ["logit" in lines[n] for n in headings] == [
        False,
        True,
        True,
    ]
    end = re.search("logit", lines[10]).end()
    assert lines[11][:end].endswith("  55.0") and lines[-1][:end].endswith("  55.0")
    assert len({len(lines[n].rstrip()) for n in (11, 12, 13)}) == 1


def test_a_validation_is_a_line(tmp_path: Path) -> None:
    metrics, stream = make(tmp_path)
    wiki = Source("wiki", 0.75, 10, 100, 9, 6.0, 4.0)
    code = Source("code", 0.25, 10, 100, 9, 2.0, 2.0)
    absent = Source("rare", 0.001, 10, 100, 9, 0.0, None)
    short = Source("short", 0.1, 10, 100, 9, 0.0, None)
    totals = (
        SourceSums(60 * 3.0, 60, 6),
        SourceSums(20 * 1.0, 20, 2),
        *[SourceSums(0.0, 0, n) for n in (0, 1)],
    )
    steps = [(3.0, 40), (math.nan, 0), (2.0, 40)]
    found = scores(steps, [wiki, code, absent, short], totals)
    metrics.log({"step": 60, "tokens": 960} | found)
    (said,) = stream.getvalue().splitlines()
    assert said == (
        "-- validation loss 2.5000 after step 60: perplexity 12.18, 1.030 bits per byte; "
        "wiki 3.0000, code 1.0000, short no label"
    )
    (record,) = read(tmp_path / "metrics.jsonl")
    assert record["valid_bits_per_byte/wiki"] == pytest.approx(3 / math.log(2) / 4)
    assert record["valid_perplexity/code"] == pytest.approx(math.e)
    assert not [key for key in record if "rare" in key]
    assert {k: n for k, n in record.items() if k.startswith("valid_labels")} == {
        **{"valid_labels": 80, "valid_labels/wiki": 60, "valid_labels/code": 20},
        "valid_labels/short": 0,
    }
    assert [key for key in record if "short" in key] == ["valid_labels/short"]


def test_bits_per_byte_are_left_out_where_they_are_not_known() -> None:
    wiki, code = (Source(name, 0.5, 1, 100, 9, 4.0, None) for name in ("wiki", "code"))
    two, names = [(2.0, 8)], {"valid_loss", "valid_perplexity", "valid_labels"}
    assert scores(two, [wiki], []) == dict(zip(sorted(names), (8, 2.0, math.exp(2)), strict=True))
    assert scores(two, [], []).keys() == names
    known = replace(code, bytes_per_token=1.0)
    assert scores(two, [known], [])["valid_bits_per_byte"] == pytest.approx(2 / math.log(2))
    some = scores(two, [wiki, known], [SourceSums(8.0, 4, 1), SourceSums(8.0, 4, 1)])
    assert [k for k in some if "bits" in k] == ["valid_bits_per_byte/code"]
    assert scores([(1000.0, 8)], [], [])["valid_perplexity"] == math.inf
    assert math.isnan(scores([(math.nan, 8)], [], [])["valid_loss"])
    assert scores([(math.nan, 0)], [wiki, known], [SourceSums(0.0, 0, 1)] * 2) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.7, "1m00s"), (125, "2m05s"), (5964, "1h39m"), (273600, "3d04h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_only_the_main_rank_prints_and_writes(tmp_path: Path) -> None:
    stream = io.StringIO()
    metrics = Metrics(tmp_path / "run", config(), False, stream=stream)
    metrics.text("page")
    metrics.event("event")
    metrics.log(record(1))
    metrics.close()
    assert stream.getvalue() == "" and not (tmp_path / "run").exists()


def test_summary_is_of_the_last_ten_logged_steps(tmp_path: Path) -> None:
    metrics, stream = make(tmp_path)
    for step in range(1, 13):
        rate = 100.0 if step > 2 else 1.0
        metrics.log(record(step, tokens_per_second_per_gpu=rate + step % 2))
    metrics.close({"tokens": 96})
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("done: step 12 after 0s | last 10 logged steps: 100 +- 1 tok/s/rank")
    assert last.endswith("0.500 +- 0.000 s per step, loss 4.8800")
    summary = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert summary["event"] == "summary" and summary["tokens"] == 96
    assert summary["tokens_per_second_per_gpu"] == 100.5


def test_the_first_step_is_not_steady(tmp_path: Path) -> None:
    """It compiles and warms up; of a single step there is nothing better."""
    metrics, stream = make(tmp_path / "a")
    metrics.log(record(1) | {"step_time": 60.0})
    assert stream.getvalue().endswith("1h39m\n")
    metrics.log(record(2))
    metrics.log(record(3))
    assert stream.getvalue().endswith("  48s\n")
    metrics.close()
    assert "last 2 logged steps: 0.500 +- 0.000 s" in stream.getvalue()
    assert steady([record(1)])["step_time_sd"] == 0.0


def test_a_run_without_steps_closes(tmp_path: Path) -> None:
    metrics, stream = make(tmp_path)
    metrics.close()
    assert stream.getvalue() == ""


# --- metrics.jsonl --------------------------------------------------------------------------------


def test_every_step_is_on_disk_at_once(tmp_path: Path) -> None:
    metrics, _ = make(tmp_path)
    for step in (1, 2):
        metrics.log(record(step))
        assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))
    assert read(tmp_path / "metrics.jsonl")[0]["loss"] == 4.99


def test_validation_and_events_do_not_repeat_a_step(tmp_path: Path) -> None:
    metrics, stream = make(tmp_path)
    metrics.log(record(1))
    metrics.log({"step": 1, "valid_loss": 2.5})
    metrics.event("saved")
    metrics.close()
    (only,) = read(tmp_path / "metrics.jsonl")
    assert (only["loss"], only["valid_loss"], only["step"]) == (4.99, 2.5, 1)
    assert "-- saved" in stream.getvalue()
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["event"], r["at"]) for r in lines if "event" in r] == [("saved", 1), ("summary", 1)]


def test_what_a_run_is_stands_before_its_records(tmp_path: Path) -> None:
    metrics, _ = make(tmp_path)
    assert start_facts(tmp_path / "metrics.jsonl") == {}
    metrics.start({"model": "tiny", "ranks": 1})
    metrics.log(record(1))
    metrics.close()
    again, _ = make(tmp_path, step=1)
    again.start({"model": "tiny", "ranks": 2})
    assert start_facts(tmp_path / "metrics.jsonl") == {"model": "tiny", "ranks": 2}
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [1]


def test_json_holds_no_nan(tmp_path: Path) -> None:
    metrics, _ = make(tmp_path)
    metrics.log(record(1) | {"loss": float("nan"), "grad_norm": float("inf")})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = (tmp_path / "metrics.jsonl").read_text()
    written = json.loads(text, parse_constant=refuse)
    assert written["loss"] is None and written["grad_norm"] is None
    assert written["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    """Killed after step 5 in the middle of a line, resumed from step 3: each step is there once."""
    metrics, _ = make(tmp_path)
    for step in range(1, 6):
        metrics.log(record(step, attempt=1))
        metrics.event(f"after {step}")
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    resumed, _ = make(tmp_path, step=3)
    for step in range(4, 8):
        resumed.log(record(step, attempt=2))
    attempts = [(r["step"], r["attempt"]) for r in read(path)]
    assert attempts == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 2)]
    events = [json.loads(t).get("event") for t in path.read_text().splitlines()]
    assert [e for e in events if e] == ["after 1", "after 2", "after 3"]
    superseded = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(t).get("step") for t in superseded] == [4, None, 5, None]


def test_a_run_from_scratch_keeps_the_old_records_aside(tmp_path: Path) -> None:
    metrics, _ = make(tmp_path)
    metrics.log(record(1))
    metrics.close()
    make(tmp_path)[0].log(record(1, attempt=2))
    assert [r["attempt"] for r in read(tmp_path / "metrics.jsonl")] == [2]
    assert read(tmp_path / "metrics.superseded.jsonl")[0]["step"] == 1


def test_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file/run \(run.dir, run.name\)") as e:
        make(tmp_path / "file" / "run")
    assert "\n" not in str(e.value)


def test_a_full_disk_loses_records_and_not_the_run(tmp_path: Path) -> None:
    metrics, stream = make(tmp_path)
    metrics.log(record(1))
    with full_disk(200):
        metrics.log(record(2, note="x" * 300))
        metrics.log(record(3, note="x" * 300))
    metrics.log(record(4))
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [1, 4]
    warnings = [t for t in stream.getvalue().splitlines() if "warning" in t]
    assert len(warnings) == 1 and "metrics.jsonl" in warnings[0]
    metrics.close()
    done = stream.getvalue().splitlines()[-1]
    assert re.match(
        rf"done: step 4 after \S+, 2 records of {tmp_path}/metrics.jsonl lost \| ", done
    )


def test_a_run_without_steps_tells_of_lost_records_too(tmp_path: Path) -> None:
    metrics, stream = make(tmp_path)
    with full_disk():
        metrics.event("nothing was left to do")
    metrics.close()
    last = stream.getvalue().splitlines()[-1]
    assert last == f"-- warning: 1 record of {tmp_path}/metrics.jsonl lost"


# --- sinks ----------------------------------------------------------------------------------------


class FakeWandb(types.ModuleType):
    """Stands in for wandb; raises in the call named `fails`."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("wandb")
        self.fails, self.calls, self.logged = fails, [], []  # type: ignore[var-annotated]
        self.Settings = dict
        self.resumed, self.summary = False, {}  # type: ignore[var-annotated]

    def _call(self, name: str, /, **kw: Any) -> None:
        self.calls.append((name, kw))
        if name == self.fails:
            raise ConnectionError("no route")

    def login(self, **kw: Any) -> bool:
        self._call("login", **kw)
        return self.fails != "not logged in"

    def init(self, **kw: Any) -> Any:
        self._call("init", **kw)
        return self

    def define_metric(self, *args: Any, **kw: Any) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        self._call("log")
        self.logged.append(values)

    def finish(self) -> None:
        self._call("finish")


@pytest.mark.parametrize("fails", ["login", "not logged in", "init", "log", "finish"])
def test_a_failing_service_is_dropped_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    fake = FakeWandb(fails)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    metrics, stream = make(tmp_path, wandb="online")
    for step in (1, 2, 3):
        metrics.log(record(step))
    metrics.close()
    warnings = [t for t in stream.getvalue().splitlines() if "warning" in t]
    assert len(warnings) == 1 and "Weights & Biases is off" in warnings[0]
    assert len(read(tmp_path / "metrics.jsonl")) == 3
    names = [name for name, _ in fake.calls]
    assert names.count("log") == {"log": 1, "finish": 3}.get(fails, 0)


def test_a_missing_library_is_dropped_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    metrics, stream = make(tmp_path, wandb="offline")
    metrics.log(record(1))
    assert stream.getvalue().count("warning") == 1


def test_wandb_gets_numbers_and_one_id_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for step in (0, 2, 0):
        fake = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        metrics, _ = make(tmp_path, step=step, wandb="offline")
        metrics.log(record(3, note="text"))
        (init,) = [kw for name, kw in fake.calls if name == "init"]
        assert init["mode"] == "offline" and init["config"]["run"]["steps"] == 100
        assert "login" not in [name for name, _ in fake.calls]
        named = {"train/loss": 4.97, "perf/step_time": 0.5, "perf/memory": 1.25}
        named |= {"perf/goodput": 0.0}  # no time has passed
        (row,) = fake.logged
        assert row.pop("_timestamp") == read(tmp_path / "metrics.jsonl")[-1]["time"]
        assert row == {"step": 3} | named
        ids.append(init["id"])
    assert ids[0] == ids[1] != ids[2]


def test_a_resumed_run_sends_what_the_server_of_wandb_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the training of step 2, not its validation, nor step 3."""
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    metrics, _ = make(tmp_path, wandb="online")
    for step in (1, 2, 3, 4):
        metrics.log(record(step))
        metrics.log({"step": step, "valid_loss": 2.0 + step})
    fake = FakeWandb()
    fake.resumed = True
    fake.summary = {"step": 2, "train/loss": 4.98, "perf/step_time": 0.5, "valid/loss": 3.0}
    fake.summary |= {"perf/memory": 1.25, "perf/goodput": 0.0}
    monkeypatch.setitem(sys.modules, "wandb", fake)
    make(tmp_path, step=3, wandb="online")
    sent = [(row["step"], row.get("train/loss", row.get("valid/loss"))) for row in fake.logged]
    assert sent == [(2, 4.0), (3, 4.97), (3, 5.0)]


def test_names_in_tracking_services_are_in_groups() -> None:
    """Every number that the trainer records, and what a validation gives."""
    groups = {
        "train": "loss mtp_loss grad_norm lr labels tokens skipped rollbacks",
        "valid": "loss perplexity labels bits_per_byte loss/wiki bits_per_byte/wiki",
        "moe": "load_max load_p95 dead_experts reruns capacity_factor aux_loss z_loss",
        "perf": "step_time data_time tokens_per_second_per_gpu tflops_per_gpu mfu memory "
        "memory_reserved memory_total",
    }
    before = {"valid": "valid_", "aux_loss": "balance/", "z_loss": "balance/"}
    for group, names in groups.items():
        for name in names.split():
            written = before.get(group, before.get(name, "")) + name
            assert tag(written) == f"{group}/{name}"


def test_tensorboard_events_are_readable(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics, stream = make(tmp_path, trackers=["tensorboard"])
    for step in (1, 2, 3):
        metrics.log(record(step, note="text"))
    metrics.close()
    resumed, _ = make(tmp_path, step=2, trackers=["tensorboard"])
    resumed.log(record(3) | {"loss": 1.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 2)) for e in events.Scalars("train/loss")] == [
        (1, 4.99),
        (2, 4.98),
        (3, 1.0),
    ]
    assert "warning" not in stream.getvalue()


def test_a_full_disk_turns_tensorboard_off_in_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread, which meets the disk, says nothing; any other thread still does."""
    others: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: others.append(args.exc_type))
    before = set(threading.enumerate())
    metrics, stream = make(tmp_path, trackers=["tensorboard"])
    (writer,) = set(threading.enumerate()) - before
    with full_disk():
        metrics.log(record(1))
        writer.join(10)
    assert not writer.is_alive()
    metrics.log(record(2))
    metrics.log(record(3))
    metrics.close()
    reported = [t for t in stream.getvalue().splitlines() if "TensorBoard" in t]
    assert len(reported) == 1 and "is off for the rest of the run" in reported[0]
    assert others == [] and capfd.readouterr().err == ""
    thread = threading.Thread(target=lambda: 1 // 0)
    thread.start()
    thread.join()
    assert others == [ZeroDivisionError]


def test_sinks_are_off_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    metrics, stream = make(tmp_path)
    metrics.log(record(1))
    metrics.close()
    assert "warning" not in stream.getvalue()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]
