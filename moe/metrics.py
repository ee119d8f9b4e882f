"""What a person sees of a run: a line per logged step, events, and a summary at the end.

The trainer hands over one flat record per logged step. The console shows what a person watches and
leaves out what is unknown; metrics.jsonl and the sinks (moe.sinks) get all of it. Only the main
rank prints and writes. Only a run folder that cannot be written at the start stops a run.
"""

import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from configs.schema import Config
from moe.sinks import Journal, Sink, make_sinks

_STEADY = 10  # logged steps of the closing summary


class Metrics:
    """Reports of one run.

    Args:
        folder: of the run; created on the main rank.
        cfg: names the sinks and the length of the run.
        is_main: whether this rank prints and writes.
        step: the step that the run resumes from, 0 for a new one.
        stream: of the console.

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
        self._step, self._began = step, time.monotonic()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_STEADY)
        self._timed = 0
        self._sinks: list[Sink] = []
        self._journal: Journal | None = None
        if not is_main:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(folder / "metrics.jsonl", step, self._warn)
        except OSError as error:
            raise ValueError(f"cannot write to {folder} (run.dir, run.name): {error}") from None
        self._sinks = make_sinks(cfg, folder, step, self._warn)

    def text(self, text: str) -> None:
        """Print a block of text."""
        if self._main:
            print(text, file=self._stream, flush=True)

    def event(self, text: str) -> None:
        """Print and write one line that is not a step: a checkpoint, a signal, a rerun."""
        self.text(f"-- {text}")
        self._write({"event": text, "at": self._step})

    def log(self, record: dict[str, Any]) -> None:
        """Report a record: `step`, and any of what `line` shows, and numbers under other names."""
        if not self._main:
            return
        self._step = record["step"]
        if "step_time" in record:
            record = record | memory()
            if self._timed == 1:  # the first one had compilation and warm-up in it
                self._recent.clear()
            self._timed += 1
            self._recent.append(record)
        self._write(record)
        for sink in self._sinks:
            sink.log(record)
        self.text(line(record, self._steps, eta=self._remaining(record)))

    def close(self, summary: dict[str, Any] | None = None) -> None:
        """Print and write the summary, with what the caller adds to it, and close every sink."""
        if not self._main:
            return
        totals = steady(list(self._recent)) | (summary or {})
        if self._recent:
            elapsed = duration(time.monotonic() - self._began)
            self.text(f"\ndone: step {self._step} after {elapsed} | {summary_line(totals)}")
        self._write({"event": "summary", "at": self._step} | totals)
        for sink in self._sinks:
            sink.close()
        if self._journal is not None:
            self._journal.close()

    def _remaining(self, record: dict[str, Any]) -> float | None:
        if "step_time" not in record or record["step"] >= self._steps:
            return None
        seconds = statistics.fmean(r["step_time"] for r in self._recent)
        return (self._steps - record["step"]) * seconds

    def _write(self, record: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.write(record)

    def _warn(self, text: str) -> None:
        self.text(f"-- warning: {text}")


def memory() -> dict[str, float]:
    """GiB: peak of the GPU and what it has; of a run without one, what this process holds."""
    if not torch.cuda.is_initialized():
        return {"memory": psutil.Process().memory_info().rss / 2**30}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "memory": torch.cuda.max_memory_allocated() / 2**30,
        "memory_reserved": torch.cuda.max_memory_reserved() / 2**30,
        "memory_total": device.total_memory / 2**30,
    }


def line(record: dict[str, Any], steps: int, eta: float | None = None) -> str:
    """The console line of a record; what it does not have is left out.

    Args:
        record: `step`, and any of loss, mtp_loss, valid_loss, grad_norm, lr, step_time (s),
            tokens_per_second_per_gpu, tflops_per_gpu, mfu (of 1), memory and memory_total (GiB),
            load_max with load_p95 and dead_experts, reruns.
        steps: of the run.
        eta: seconds to its end.
    """
    has = record.get
    parts = [f"step {record['step']:>{len(str(steps))}}/{steps}"]
    parts += [
        f"{name} {record[key]:{form}}"
        for key, name, form in (
            ("valid_loss", "validation loss", ".4f"),
            ("loss", "loss", ".4f"),
            ("mtp_loss", "mtp", ".4f"),
            ("grad_norm", "gnorm", ".2f"),
            ("lr", "lr", ".1e"),
        )
        if key in record
    ]
    # Peaks and rates of a GPU make no sense of a CPU process.
    on_gpu = "memory_total" in record
    if "tokens_per_second_per_gpu" in record:
        unit = "gpu" if on_gpu else "rank"
        parts.append(f"{record['tokens_per_second_per_gpu']:,.0f} tok/s/{unit}")
    if on_gpu and "tflops_per_gpu" in record:
        mfu = f" mfu {record['mfu']:.1%}" if "mfu" in record else ""
        parts.append(f"{record['tflops_per_gpu']:.0f} TF/s/gpu{mfu}")
    if "step_time" in record:
        parts.append(f"{record['step_time']:.3f} s")
    if "memory" in record:
        total = f"/{record['memory_total']:.1f}" if on_gpu else ""
        parts.append(f"mem {record['memory']:.1f}{total} GiB")
    if has("load_max"):
        load = f"lb max {record['load_max']:.2f} p95 {record['load_p95']:.2f}"
        parts.append(f"{load} dead {record['dead_experts']}")
    if has("reruns"):
        parts.append(f"reruns {record['reruns']}")
    if eta is not None:
        parts.append(f"eta {duration(eta)}")
    return " | ".join(parts)


def steady(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of the rates of `records`, and the last loss."""
    totals: dict[str, Any] = {"records": len(records)}
    for key in ("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "step_time"):
        values = [record[key] for record in records if key in record]
        if values:
            totals[key] = statistics.fmean(values)
            totals[f"{key}_sd"] = statistics.stdev(values) if len(values) > 1 else 0.0
    for key in ("loss", "memory", "memory_total"):
        if records and key in records[-1]:
            totals[key] = records[-1][key]
    return totals


def summary_line(totals: dict[str, Any]) -> str:
    """`last 10 logged steps: 13,402 +- 35 tok/s/gpu, ...` of what `steady` returns."""
    on_gpu = "memory_total" in totals
    parts = []
    if "tokens_per_second_per_gpu" in totals:
        mean, spread = (totals[f"tokens_per_second_per_gpu{s}"] for s in ("", "_sd"))
        parts.append(f"{mean:,.0f} +- {spread:,.0f} tok/s/{'gpu' if on_gpu else 'rank'}")
    if on_gpu and "tflops_per_gpu" in totals:
        mfu = f" (mfu {totals['mfu']:.1%})" if "mfu" in totals else ""
        parts.append(f"{totals['tflops_per_gpu']:.0f} TF/s/gpu{mfu}")
    if "step_time" in totals:
        parts.append(f"{totals['step_time']:.3f} +- {totals['step_time_sd']:.3f} s a step")
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
