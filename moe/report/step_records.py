"""Log records of training steps: what accepted steps measured since the last record, and warnings.

Legend: R ranks.
"""

import math
import socket
from typing import Any

import torch
from torch import Tensor

from phalanx.moe.job import Job
from phalanx.moe.report.expert_watch import ExpertWatch
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.report.slow_ranks import SlowRanks
from phalanx.moe.report.throughput import Pace
from phalanx.moe.router import balance
from phalanx.parallel.fault.agreement import gather


class StepRecords:
    """Measurements of steps between two records, the same on every rank. Collective.

    Args:
        job: job whose steps are measured.
        collector: reads the tables of the load of the experts.
        metrics: sink of records and warnings.
        pace: rates of the steps.
        step: step from which the run starts.
    """

    def __init__(
        self, job: Job, collector: balance.Collector, metrics: Metrics, pace: Pace, step: int
    ) -> None:
        self._job, self._collector = job, collector
        self._metrics, self._pace = metrics, pace
        self._load: Tensor | None = None
        """All ranks' table of the load of the experts; None if all steps were skipped."""
        self._max_logits: list[Tensor] = []
        """Largest logits by layer, of the steps that measured them."""
        moe, runtime = job.cfg.model.moe, job.runtime
        self._experts = ExpertWatch(moe.experts / moe.top_k, step)
        location = f"rank {runtime.rank} on {socket.gethostname()}, {runtime.device}"
        self._slow = SlowRanks(gather(location), step)

    def add_times(self, late_R: Tensor) -> None:
        """Add the seconds that each rank took until its device had a step: fp64, on the host."""
        self._slow.add(late_R)

    def add_accepted(self, load: Tensor, max_logits: Tensor | None) -> None:
        """Add a step that was not skipped.

        Args:
            load: table of the load of the experts since the last record.
            max_logits: largest logit of each layer; None if the step did not measure them.
        """
        self._load = load
        if max_logits is not None:
            self._max_logits.append(max_logits)

    def log(self, record: dict[str, Any]) -> None:
        """Complete a record with the measurements, log it, and report warnings.

        Args:
            record: `step`, and other numbers of the step.
        """
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
        """Load of the steps since the last record, without those that were skipped."""
        table, self._load = self._load, None
        balance.reset(self._job.engine.modules)
        return balance.Balance() if table is None else self._collector.read(table)

    def _take_max_logits(self) -> dict[str, Any]:
        """Largest attention logits of the steps since the last record: in total and by layer.

        Empty if no step measured them; layers of linear attention have none.
        """
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
