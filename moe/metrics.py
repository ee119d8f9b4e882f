"""What a person and a machine see of a run: a console line per step, metrics.jsonl, and optional sinks.

The trainer hands over one flat record per logged step. metrics.jsonl always gets it whole; the console shows
what a person watches; Weights & Biases and TensorBoard are additions that can fail without stopping training.
Only the main rank writes. A resumed run drops the records after its step, so a reader sees each step once.
"""

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from configs.schema import Config
from moe.sinks import Sink, make_sinks

_STEADY = 10  # steps of the closing summary


class Metrics:
    """Reports of one run.

    Args:
        folder: of the run; created on the main rank.
        cfg: names the sinks and the length of the run.
        is_main: whether this rank writes.
        step: the step that the run resumes from, 0 for a new one.
        stream: of the console.
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
        self._cfg, self._main, self._stream = cfg, is_main, stream or sys.stdout
        self._file: TextIO | None = None
        self._sinks: list[Sink] = []
        self._seconds: list[float] = []
        self._last: dict[str, Any] = {}
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _drop_after(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._sinks = make_sinks(cfg, folder, self.event)

    def text(self, text: str) -> None:
        """Print a block of text."""
        if self._main:
            print(text, file=self._stream, flush=True)

    def event(self, text: str) -> None:
        """Print one line that is not a step."""
        self.text(f"-- {text}")

    def log(self, record: dict[str, Any]) -> None:
        """Report one record; it has `step`, and what it has else is shown and written."""
        if not self._main:
            return
        if "step_time" in record:
            record = record | memory()
            self._seconds = [*self._seconds, record["step_time"]][-_STEADY:]
            self._last = record
        assert self._file is not None
        finite = {k: v if _is_finite(v) else None for k, v in record.items()}
        self._file.write(json.dumps({**finite, "time": time.time()}) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.log(record)
        self.text(line(record, self._cfg.run.steps))

    def close(self) -> None:
        """Print the summary and close every sink."""
        if not self._main:
            return
        if self._seconds and self._last:
            self.text(_summary(self._last, self._seconds))
        for sink in self._sinks:
            sink.close()
        assert self._file is not None
        self._file.close()


def memory() -> dict[str, float]:
    """Peak and total GiB of the GPU since the last call, or resident and total GiB of this process."""
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated() / 2**30
        return {"memory": peak, "memory_total": torch.cuda.mem_get_info()[1] / 2**30}
    used, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    return {"memory": used / 2**30, "memory_total": total / 2**30}


def line(record: dict[str, Any], steps: int) -> str:
    """The console line of a record; what is unknown is left out."""
    step, width = record["step"], len(str(steps))
    parts = [f"step {step:>{width}}/{steps}"]
    if "valid_loss" in record:
        parts.append(f"validation loss {record['valid_loss']:.4f}")
    if "loss" in record:
        parts.append(f"loss {record['loss']:.4f}")
    if "mtp_loss" in record:
        parts.append(f"mtp {record['mtp_loss']:.4f}")
    if "grad_norm" in record:
        parts.append(f"gnorm {record['grad_norm']:.2f}")
    if "lr" in record:
        parts.append(f"lr {record['lr']:.1e}")
    if "tokens_per_second_per_gpu" in record:
        parts.append(f"{record['tokens_per_second_per_gpu']:,.0f} tok/s/gpu")
        rate = f"{record['tflops_per_gpu']:.3g} TF/s/gpu"
        parts.append(rate + (f" mfu {record['mfu']:.1%}" if "mfu" in record else ""))
    if "step_time" in record:
        parts.append(f"{record['step_time']:.3f} s")
    if "memory" in record:
        parts.append(f"mem {record['memory']:.1f}/{record['memory_total']:.0f} GiB")
    if "load_max" in record:
        parts.append(
            f"lb max {record['load_max']:.2f} p95 {record['load_p95']:.2f} "
            f"dead {record['dead_experts']}"
        )
    if record.get("reruns"):
        parts.append(f"reruns {record['reruns']}")
    if "step_time" in record and step < steps:
        parts.append(f"eta {duration((steps - step) * record['step_time'])}")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """`1h39m`, `2m05s`, `8s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _summary(record: dict[str, Any], seconds: list[float]) -> str:
    mean = statistics.fmean(seconds)
    spread = statistics.pstdev(seconds) / mean
    tokens = record["tokens_per_second_per_gpu"] * record["step_time"] / mean
    rate = record["tflops_per_gpu"] * record["step_time"] / mean
    return (
        f"\nlast {len(seconds)} steps: {tokens:,.0f} tokens/s/gpu, {rate:.3g} TFLOP/s/gpu, "
        f"{mean:.3f} s a step (spread {spread:.1%}), loss {record['loss']:.4f}"
    )


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _drop_after(path: Path, step: int) -> None:
    """Keep the records up to `step`; a line that a killed run left half written is dropped too."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(text)
        except json.JSONDecodeError:
            continue
        if record["step"] <= step:
            kept.append(text + "\n")
    path.write_text("".join(kept), encoding="utf-8")
