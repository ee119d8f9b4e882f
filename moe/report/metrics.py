"""Metrics of a run: a table with a row per logged step, events, a closing summary.

The trainer passes one flat record per logged step. The console shows the columns that are known;
metrics.jsonl and the sinks (moe.report.trackers) receive everything. Only the main rank prints and
writes. Only a run folder that cannot be written at the start stops a run.
"""

import contextlib
import statistics
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import psutil
import torch

from phalanx.configs.arithmetic.batch_sizes import samples_after, size_at, spans
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.report.goodput import Clock, earlier, goodput, goodput_line, trained_until
from phalanx.moe.report.loggers import Journal, lines, logged
from phalanx.moe.report.service import Sink
from phalanx.moe.report.trackers import make_sinks
from phalanx.parallel.dispatcher.capacity import Growth

_STEADY = 10  # logged steps of the closing summary
_PAGE = 25  # rows between headings
_COUNTS = ("reruns", "skipped", "rollbacks")  # shown after a row in which they have grown


class Metrics:
    """Reports of one run.

    Args:
        folder: of the run; created on the main rank.
        is_main: whether this rank prints and writes.
        step: step that the run resumes from; 0 for a new run.
        stream: console; stdout by default.

    Raises:
        ValueError: the run folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        cfg: Config,
        is_main: bool,
        *,
        step: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self._steps, self._main, self._stream = cfg.run.steps, is_main, stream or sys.stdout
        self._data = cfg.data
        self._step, self._start = step, time.monotonic()
        self._resumed = f", resumed from step {step}," if step else ""
        self._recent: deque[dict[str, Any]] = deque(maxlen=_STEADY)
        self._timed, self._rows = 0, 0
        self._shown: Collection[str] = ()
        self._printed = dict.fromkeys(_COUNTS, 0)
        self._sinks: list[Sink] = []
        self._path = folder / "metrics.jsonl"
        self._journal: Journal | None = None
        self.clock = Clock()  # on the main rank with the time of earlier launches
        if not is_main:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = lines(self._path)
            self.clock = Clock(earlier(known, step), known[-1].get("time", 0.0) if known else 0.0)
            self._journal = Journal(self._path, step, self._warn)
        except OSError as error:
            raise ValueError(f"cannot write to {folder} (run.dir, run.name): {error}") from None
        # Up to `step`: the journal has moved later ones away.
        self._sinks = make_sinks(cfg, folder, step, self._warn, logged(self._path))

    def text(self, text: str) -> None:
        """Print a block of text; it is lost if the console is on a full disk or its reader left."""
        if self._main:
            with contextlib.suppress(OSError):
                print(redacted(text), file=self._stream, flush=True)

    def event(self, text: str, *, shown: str = "", **facts: str) -> None:
        """Print and write one line that is not a step: a checkpoint, a signal, a rerun.

        The block `shown` is printed below it; `facts` are further fields of the record.
        """
        self.text("\n".join(filter(None, (f"-- {text}", shown))))
        self._write({"event": redacted(text), **redacted(facts), "at": self._step})

    def reruns(self, grown: Iterable[Growth], subject: str) -> None:
        """Print and write a line for each enlarged capacity, after which `subject` was rerun."""
        for growth in grown:
            self.event(growth.event(subject))

    def start(self, facts: dict[str, Any]) -> None:
        """Write the facts of a run (`title_facts`), for the titles of tables and plots."""
        self._write({"event": "start", "at": self._step} | redacted(facts))

    def log(self, record: dict[str, Any]) -> None:
        """Report a record of a step or a validation: `step`, columns of `line`, other numbers.

        `reruns`, `skipped` and `rollbacks` are printed when they have grown.
        """
        if not self._main:
            return
        self._step = record["step"]
        record = record | {"time": round(time.time(), 3)}
        if "step_time" in record:
            record = record | memory() | {"goodput": goodput(self.clock.seconds)}
            if self._timed == 1:  # the first one had compilation and warm-up in it
                self._recent.clear()
            self._timed += 1
            self._recent.append(record)
        self._write(record)
        for sink in self._sinks:
            sink.log(record)
        if "valid_loss" in record:
            self.text(f"-- {validation_line(record)}")
        elif not any(key.startswith("tasks") for key in record):
            self._row(record)

    def _row(self, record: dict[str, Any]) -> None:
        # Some numbers are not in every record: their column stays once there was one.
        appeared = any(c.key not in self._shown for c in _columns(record))
        if self._rows % _PAGE == 0 or appeared:
            self._shown = {*self._shown, *record}
            self.text(heading(record, self._steps, self._shown))
        self._rows += 1
        row = line(record, self._steps, eta=self._remaining(record), shown=self._shown)
        for count in _COUNTS:
            if record.get(count, 0) > self._printed[count]:
                self._printed[count] = record[count]
                row += f"  {count} {record[count]}"
        self.text(row)

    def rewind(self, step: int) -> None:
        """Supersede records after `step`, to which the run returns."""
        self._step = step
        if self._journal is not None:
            self.clock.undo(trained_until(lines(self._path), step))
            self._journal.rewind(step)
        for sink in self._sinks:
            sink.rewind(step)

    def flush(self) -> None:
        """Have services bring what they were given to a disk or server, as before a checkpoint."""
        for sink in self._sinks:
            sink.flush()

    def close(self, summary: dict[str, Any] | None = None, *, ended: str = "done") -> None:
        """Print and write the summary, and close every sink.

        `ended` is `done`, or why the run ended.
        """
        if not self._main:
            return
        self.clock.lap("end")
        totals = steady(list(self._recent)) | (summary or {})
        totals["goodput"] = goodput(self.clock.seconds)
        self._write({"event": "summary", "at": self._step} | totals)
        lost = self._journal.lost if self._journal is not None else 0
        losses = f"{lost:,} record{'s' * (lost > 1)} of {self._path} lost" if lost else ""
        if self._recent:
            elapsed = duration(time.monotonic() - self._start)
            done = f"{ended}: step {self._step}{self._resumed} after {elapsed}"
            done += f", {losses}" if losses else ""
            self.text(f"\n{goodput_line(self.clock.seconds)}")
            self.text(f"{done} | {summary_line(totals)}")
        elif losses:
            self._warn(losses)
        for sink in self._sinks:
            sink.close()
        if self._journal is not None:
            self._journal.close()

    def _remaining(self, record: dict[str, Any]) -> float | None:
        if "step_time" not in record or record["step"] >= self._steps:
            return None
        seconds = statistics.fmean(r["step_time"] for r in self._recent)
        samples = round(record.get("tokens", 0) / self._data.sequence_length)
        left = samples_after(self._data, self._steps - record["step"], samples) - samples
        return left / size_at(spans(self._data), samples) * seconds  # later batches may be larger

    def _write(self, record: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.write(record | {"seconds": self.clock.rounded()})

    def _warn(self, text: str) -> None:
        self.text(f"-- warning: {text}")


def memory() -> dict[str, float]:
    """GiB: peak and total memory of the GPU; resident memory of the process without one."""
    if not torch.cuda.is_initialized():
        return {"memory": psutil.Process().memory_info().rss / 2**30}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "memory": torch.cuda.max_memory_allocated() / 2**30,
        "memory_reserved": torch.cuda.max_memory_reserved() / 2**30,
        "memory_total": device.total_memory / 2**30,
    }


class _Column(NamedTuple):
    key: str
    name: str
    width: int
    form: str
    gpu: bool = False  # shown on GPUs only


_COLUMNS = (
    _Column("loss", "loss", 7, ".4f"),
    _Column("mtp_loss", "mtp", 7, ".4f"),
    _Column("grad_norm", "gnorm", 6, ".2f"),
    _Column("lr", "lr", 7, ".1e"),
    _Column("tokens_per_second_per_gpu", "tok/s/gpu", 9, ",.0f"),
    _Column("tflops_per_gpu", "TF/s", 4, ".0f", gpu=True),
    _Column("mfu", "mfu", 5, ".1%", gpu=True),
    _Column("mfu_fp8", "of FP8", 6, ".1%", gpu=True),
    _Column("step_time", "s/step", 6, ".3f"),
    _Column("memory", "GiB", 5, ".1f"),
    _Column("load_max", "lb max", 6, ".2f"),
    _Column("load_p95", "p95", 4, ".2f"),
    _Column("dead_experts", "dead", 4, "d"),
    _Column("max_logit", "logit", 6, ".1f"),
)


def heading(record: dict[str, Any], steps: int, shown: Collection[str] = ()) -> str:
    """Column names over the rows of `line`."""
    rank = not _on_gpu(record)
    names = [
        (c.name.replace("gpu", "rank") if rank else c.name).rjust(_width(c, rank))
        for c in _columns(record, shown)
    ]
    return "  ".join([_step("step", steps), *names, "eta".rjust(6)])


def line(
    record: dict[str, Any], steps: int, eta: float | None = None, shown: Collection[str] = ()
) -> str:
    """A row of the console's table; columns that the record lacks are left out.

    Args:
        record: `step`, and any of loss, mtp_loss, grad_norm, lr, tokens_per_second_per_gpu,
            tflops_per_gpu, mfu and mfu_fp8 (fractions), step_time (s), memory and memory_total
            (GiB), load_max with load_p95 and dead_experts, max_logit.
        steps: steps of the run.
        eta: remaining seconds.
        shown: keys of the heading; those that the record lacks are blank.
    """
    rank = not _on_gpu(record)
    values = [
        f"{record[c.key]:{_width(c, rank)}{c.form}}" if c.key in record else " " * _width(c, rank)
        for c in _columns(record, shown)
    ]
    step = _step(f"{record['step']}/{steps}", steps)
    return "  ".join([step, *values, "" if eta is None else duration(eta).rjust(6)]).rstrip()


def _step(text: str, steps: int) -> str:
    return text.rjust(max(4, 2 * len(str(steps)) + 1))


def _columns(record: dict[str, Any], shown: Collection[str] = ()) -> list[_Column]:
    keys = {*record, *shown}
    return [c for c in _COLUMNS if c.key in keys and (_on_gpu(record) or not c.gpu)]


def _width(column: _Column, rank: bool) -> int:
    return column.width + (rank and "gpu" in column.name)


def _on_gpu(record: dict[str, Any]) -> bool:
    return "memory_total" in record


def steady(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of the rates of `records`, mean load, and the last loss."""
    totals: dict[str, Any] = {"records": len(records)}
    for key in ("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "mfu_fp8", "step_time"):
        values = [record[key] for record in records if key in record]
        if values:
            totals[key] = statistics.fmean(values)
            totals[f"{key}_sd"] = statistics.stdev(values) if len(values) > 1 else 0.0
    of_ranks = ("rank_load", "rank_load_without_replicas", "rank_load_with_replicas")
    for key in ("load_max", *of_ranks, "replicas", "dead_experts"):
        values = [record[key] for record in records if key in record]
        if values:
            totals[key] = statistics.fmean(values)
    for key in ("loss", "memory", "memory_total"):
        if records and key in records[-1]:
            totals[key] = records[-1][key]
    return totals


def validation_line(record: dict[str, Any]) -> str:
    """`validation loss 2.5000 after step 60: perplexity 12.18, 3.607 bits per byte; wiki 2.4`."""
    text = f"validation loss {record['valid_loss']:.4f} after step {record['step']}"
    more = []
    if "valid_perplexity" in record:
        more.append(f"perplexity {record['valid_perplexity']:.4g}")
    if "valid_bits_per_byte" in record:
        more.append(f"{record['valid_bits_per_byte']:.3f} bits per byte")
    parts = [", ".join(more)] if more else []
    named = []
    for key, labels in record.items():
        if key.startswith("valid_labels/"):
            name = key.removeprefix("valid_labels/")
            loss = f"{record[f'valid_loss/{name}']:.4f}" if labels else "no label"
            named.append(f"{name} {loss}")
    if named:
        parts.append(", ".join(named))
    return text + (f": {'; '.join(parts)}" if parts else "")


def summary_line(totals: dict[str, Any]) -> str:
    """`last 10 logged steps: 13,402 +- 35 tok/s/gpu, ...` from the result of `steady`."""
    on_gpu = _on_gpu(totals)
    parts = []
    if "tokens_per_second_per_gpu" in totals:
        mean, spread = (totals[f"tokens_per_second_per_gpu{s}"] for s in ("", "_sd"))
        parts.append(f"{mean:,.0f} +- {spread:,.0f} tok/s/{'gpu' if on_gpu else 'rank'}")
    if on_gpu and "tflops_per_gpu" in totals:
        mfu = f" (mfu {totals['mfu']:.1%}" if "mfu" in totals else ""
        mfu += f", {totals['mfu_fp8']:.1%} of FP8" if "mfu_fp8" in totals else ""
        mfu += ")" if mfu else ""
        parts.append(f"{totals['tflops_per_gpu']:.0f} TF/s/gpu{mfu}")
    if "step_time" in totals:
        parts.append(f"{totals['step_time']:.3f} +- {totals['step_time_sd']:.3f} s per step")
    if "loss" in totals:
        parts.append(f"loss {totals['loss']:.4f}")
    return f"last {totals['records']} logged steps: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """`3d04h`, `1h39m`, `2m05s`, `8s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
