"""A grouped GEMM that runs beside a push: the first matrix of the experts, on all SMs but some."""

import math
from typing import Any

import torch

from kernels.sm90.fc1_act import fc1_act
from scripts.bench.models import Model
from scripts.bench.problems import balanced, experts

_EXPERTS = 8
_HEAD_START_CYCLES = 60_000
"""By which the GEMM is ahead; about 30 us."""


class Gemms:
    """`measure.Company`: launches of `fc1_act` from before a side begins until after its end.

    Args:
        model: sizes of the experts.
        tokens: of a rank.
        sms: SMs that are left free.
        ms: how long the launches must last at least.
    """

    gigabytes_per_second = 0.0

    def __init__(self, model: Model, tokens: int, sms: int, ms: float) -> None:
        self._sms, self._act = sms, model.activation
        rows = tokens * model.top_k // 2
        shape = (rows, model.hidden, model.ffn, _EXPERTS)
        device = torch.device("cuda", torch.cuda.current_device())
        p = experts(shape, balanced(rows, _EXPERTS), device)
        self._x_SD, self._w1, self._offsets = p.x_SD, p.w1, p.offsets
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._ends: list[tuple[Any, Any]] = []
        self._launches = 1
        with torch.cuda.stream(self._stream):
            self._run()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._run()
            end.record()
        end.synchronize()
        # The last one must still run when the push ends.
        self._launches = 1 + math.ceil(ms / begin.elapsed_time(end))

    def _run(self) -> None:
        for _ in range(self._launches):
            fc1_act(
                self._x_SD,
                self._w1,
                self._offsets,
                self._act,
                keep_h=False,
                sm_margin=self._sms,
            )

    def start(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run()
            self._end = torch.cuda.Event(enable_timing=True)
            self._end.record()
        torch.cuda._sleep(_HEAD_START_CYCLES)

    def join(self, end: Any) -> None:
        self._ends.append((end, self._end))
        torch.cuda.current_stream().wait_event(self._end)

    def shortest_lead(self) -> float:
        """Least milliseconds by which the GEMM outlasted a push; negative if once it did not."""
        return min(end.elapsed_time(later) for end, later in self._ends)
