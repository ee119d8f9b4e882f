"""Log records of training steps: what accepted steps measured since the last record, and warnings.

FLOPs are those of `configs.arithmetic.accounting`.

Legend: R ranks.
"""

import math
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.configs.arithmetic.accounting import bf16_peak, flops_per_token, fp8_peak
from phalanx.configs.formats import in_bf16, is_fp8
from phalanx.configs.knobs import pluralize
from phalanx.configs.schema import Config
from phalanx.moe.job import Job
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.report.slow_ranks import SlowRanks
from phalanx.moe.router import balance
from phalanx.moe.router.balance import Balance
from phalanx.parallel.fault.agreement import gather
from phalanx.parallel.runtime import Runtime


class Pace:
    """Clock over training steps; `samples` returns the data cursor.

    The trainer restarts it after anything that is not a step. It is read when the device has
    finished the last step except for the optimizer update: between two readings there are as many
    updates as steps.
    """

    def __init__(self, cfg: Config, runtime: Runtime, samples: Callable[[], int]) -> None:
        self._samples = samples
        self._tokens = cfg.data.sequence_length / runtime.world
        self._flops = flops_per_token(cfg.model, cfg.data.sequence_length)
        self._peaks = peaks(cfg, runtime.device)
        self._device = runtime.device
        self.restart(0)

    def restart(self, step: int) -> None:
        """Start the clock at the end of `step`."""
        self._since, self._step, self._read = time.perf_counter(), step, self._samples()
        self._restarted = True

    def rates(self, step: int) -> dict[str, float]:
        """Mean rates of the steps up to `step` since the clock was started; restarts it.

        step_time (s), tokens_per_second_per_gpu, tflops_per_gpu; if the device's peaks are known
        mfu, the fraction of the bf16 peak, and in FP8 runs mfu_fp8, that of the FP8 peak.
        """
        now = until = time.perf_counter()
        if self._restarted and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # no update was running when the clock started
            until = time.perf_counter()
        seconds = (until - self._since) / (step - self._step)
        samples = (self._samples() - self._read) / (step - self._step)
        self._since, self._step, self._restarted = now, step, False
        self._read = self._samples()
        tokens = samples * self._tokens / seconds
        tflops = tokens * self._flops / 1e12
        utilisation = {name: tflops / peak for name, peak in self._peaks.items()}
        return {
            "step_time": seconds,
            "tokens_per_second_per_gpu": tokens,
            "tflops_per_gpu": tflops,
            **utilisation,
        }


def peaks(cfg: Config, device: torch.device) -> dict[str, float]:
    """Dense peaks in TFLOP/s by name of the utilisation: `mfu`, `mfu_fp8`.

    FP8 runs have both, so that they compare with bf16 ones. Unknown devices and CPUs have none.
    """
    if device.type != "cuda" or not in_bf16(cfg):
        return {}
    name = torch.cuda.get_device_name(device)
    known = {"mfu": bf16_peak(name), "mfu_fp8": fp8_peak(name) if is_fp8(cfg) else None}
    return {key: peak for key, peak in known.items() if peak}


class StepRecords:
    """Measurements of steps between two records, the same on every rank. Collective.

    The `collector` reads the tables of the load of the experts; the run starts from `step`.
    """

    def __init__(
        self, job: Job, collector: balance.Collector, metrics: Metrics, pace: Pace, step: int
    ) -> None:
        self._job, self._collector = job, collector
        self._metrics, self._pace = metrics, pace
        self._load: Tensor | None = None  # of all ranks; None if all steps were skipped
        self._max_logits: list[Tensor] = []  # by layer, of the steps that measured them
        moe, runtime = job.cfg.model.moe, job.runtime
        self._experts = ExpertWatch(moe.experts / moe.top_k, step)
        location = f"rank {runtime.rank} on {socket.gethostname()}, {runtime.device}"
        self._slow = SlowRanks(gather(location), step)

    def add_times(self, ready_seconds_R: Tensor) -> None:
        """Add the seconds that each rank took until its device had a step: fp64, on the host."""
        self._slow.add(ready_seconds_R)

    def add_accepted(self, load: Tensor, max_logits: Tensor | None) -> None:
        """Add a step that was not skipped.

        The `load` is the table of the experts since the last record; `max_logits` are by layer,
        None if the step did not measure them.
        """
        self._load = load
        if max_logits is not None:
            self._max_logits.append(max_logits)

    def log(self, record: dict[str, Any]) -> None:
        """Complete a record with the measurements, log it, and report warnings."""
        load, step = self._take_load(), record["step"]
        record |= self._pace.rates(step)
        late, warnings = self._slow.look(step, record["step_time"])
        record |= {"late": late} if late else {}
        record |= _load_record(load) | self._take_max_logits()
        self._metrics.log(record)
        for warning in (*self._experts.look(load, step), *warnings):
            self._metrics.event(warning)

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, to which the run is rolled back."""
        self._take_load()
        self._max_logits = []
        self._experts.rewind(step)
        self._slow.rewind(step)

    def _take_load(self) -> balance.Balance:
        table, self._load = self._load, None
        balance.reset(self._job.engine.modules)
        return balance.Balance() if table is None else self._collector.read(table)

    def _take_max_logits(self) -> dict[str, Any]:
        """Largest attention logits since the last record, in total and by layer, if measured."""
        measured, self._max_logits = self._max_logits, []
        if not measured:
            return {}
        by_layer = torch.stack(measured).amax(0).tolist()
        numbered = {str(n): x for n, x in enumerate(by_layer, 1) if x != -math.inf}
        largest = max(numbered.values())
        return {
            "max_logit": largest,
            "max_logits": {n: float(f"{x:.6g}") for n, x in numbered.items()},
        }


def _load_record(load: balance.Balance) -> dict[str, Any]:
    record: dict[str, Any] = {}
    if load.load:  # empty if all steps since the last record were skipped
        record |= {"load_max": load.worst, "load_p95": load.p95, "dead_experts": load.dead}
        record |= {"layers": load.by_layer}
        record |= {"rank_load": load.rank_load} if load.rank_load else {}
    record |= load.counted
    return record | {f"balance/{name}": value for name, value in load.losses.items() if value}


PATIENCE = 100  # steps for which an expert has no token, or a layer is collapsed, before a warning
EVERY = 500  # steps between two warnings of one kind
_REMEDY = "raise model.moe.router.bias_rate or a balancing loss (aux_loss, seq_aux_loss)"


class ExpertWatch:
    """Warns about dead experts and about layers that send most tokens to few experts.

    Short episodes of either are normal, above all early in training; only lasting ones cause a
    warning, at most one every `EVERY` steps. `most` is the load of an expert over the mean if every
    token chose it: experts / top_k.
    """

    def __init__(self, most: float, step: int) -> None:
        self._most, self._limit = most, (1 + most) / 2
        self._step = step
        self._idle: dict[tuple[int, int], int] = {}  # (layer, expert) -> last step with a token
        self._heavy: dict[int, int] = {}  # layer -> last step below the limit
        self._warned: dict[str, int] = {}  # kind of warning -> step of the last one

    def look(self, balance: Balance, step: int) -> list[str]:
        """Warnings due at `step`, one line each; `balance` covers the steps since the last call."""
        before, self._step = self._step, step
        heavy = [layer for layer, load in balance.load.items() if load > self._limit]
        self._idle = {key: self._idle.get(key, before) for key in balance.idle}
        self._heavy = {layer: self._heavy.get(layer, before) for layer in heavy}
        warnings = []
        if dead := sorted(k for k, since in self._idle.items() if step - since >= PATIENCE):
            names = ", ".join(f"layer {layer} expert {expert}" for layer, expert in dead[:3])
            more = ", ..." if len(dead) > 3 else ""
            count = pluralize(len(dead), "expert")
            text = f"{count} had no token for {PATIENCE} steps ({names}{more})"
            warnings += self._due("dead", text)
        if late := [layer for layer, since in self._heavy.items() if step - since >= PATIENCE]:
            worst = max(late, key=lambda layer: balance.load[layer])
            have = "has" if len(late) == 1 else "have"
            text = (
                f"{pluralize(len(late), 'layer')} {have} collapsed for {PATIENCE} steps: the "
                f"busiest expert of layer {worst} has {balance.load[worst]:.1f} x the mean load, "
                f"of at most {self._most:.1f}"
            )
            warnings += self._due("collapsed", text)
        return warnings

    def rewind(self, step: int) -> None:
        """Forget everything after `step`, to which the run returns."""
        self._step = step
        self._idle.clear()
        self._heavy.clear()

    def _due(self, kind: str, text: str) -> list[str]:
        if self._step - self._warned.get(kind, -EVERY) < EVERY:
            return []
        self._warned[kind] = self._step
        return [f"warning: {text}; {_REMEDY}"]
