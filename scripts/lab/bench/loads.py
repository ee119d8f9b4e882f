"""Background loads: work that overlaps a timed call on other SMs."""

import math
from typing import Any, Protocol

import torch

from phalanx.kernels.launch_options import LaunchOptions
from phalanx.scripts.lab.bench.models import Model
from phalanx.scripts.lab.bench.problems import balanced, experts

_HEAD_START_CYCLES = 60_000  # head start of the load; about 30 us
_EXPERTS = 8
_COPY_BYTES = 256 * 2**20
_MAX_PASSES = 400_000
_TRIAL_PASSES = 2_000


class BackgroundLoad(Protocol):
    """Work that overlaps a timed call."""

    @property
    def gigabytes_per_second(self) -> float:
        """Rate of the copies alone, bytes read plus written."""

    def shortest_lead(self) -> float:
        """Least milliseconds by which it outlasted a call; negative if it once ended earlier."""

    def start(self) -> None: ...

    def join(self, end: Any) -> None: ...


class Launches:
    """Base of a `BackgroundLoad` that launches on a stream of its own."""

    gigabytes_per_second = 0.0

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._ends: list[tuple[Any, Any]] = []

    def launch(self) -> None:
        """Launch work that starts before a timed call and ends after it."""
        raise NotImplementedError

    def start(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.launch()
            self._end = torch.cuda.Event(enable_timing=True)
            self._end.record()
        torch.cuda._sleep(_HEAD_START_CYCLES)

    def join(self, end: Any) -> None:
        self._ends.append((end, self._end))
        torch.cuda.current_stream().wait_event(self._end)

    def shortest_lead(self) -> float:
        return min(end.elapsed_time(later) for end, later in self._ends)

    def trial(self) -> float:
        """Milliseconds of the second of two launches, without other work."""
        with torch.cuda.stream(self._stream):
            self.launch()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.launch()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end)


class Copies(Launches):
    """Copies between two buffers on `programs` SMs, for at least `ms` milliseconds."""

    def __init__(self, programs: int, ms: float) -> None:
        """Size the copies by a trial launch; `ms` is their least duration."""
        from phalanx.scripts.lab.bench.copy_kernel import BLOCK

        super().__init__()
        self.programs, self.passes = programs, _TRIAL_PASSES
        self.source = torch.zeros(_COPY_BYTES // 2, dtype=torch.int16, device="cuda")
        self.target = torch.empty_like(self.source)
        self._stream.wait_stream(torch.cuda.current_stream())
        trial_ms = self.trial()
        self.gigabytes_per_second = 4e-6 * BLOCK * programs * _TRIAL_PASSES / trial_ms
        self.passes = passes_for(ms, trial_ms)

    def launch(self) -> None:
        from phalanx.scripts.lab.bench.copy_kernel import BLOCK, copy_blocks

        blocks = self.source.numel() // BLOCK
        copy_blocks[(self.programs,)](
            self.source, self.target, blocks, self.passes, BLOCK=BLOCK, num_warps=8
        )


def passes_for(ms: float, trial_ms: float) -> int:
    """Passes that take `ms` if `_TRIAL_PASSES` take `trial_ms`: a multiple of 16, as the trial's.

    Triton specializes on that and would recompile otherwise.
    """
    return min(_MAX_PASSES, 16 * math.ceil(_TRIAL_PASSES * ms / trial_ms / 16))


class Gemms(Launches):
    """Launches of `fc1_act` on all SMs but `sms`, for at least `ms` milliseconds."""

    def __init__(self, model: Model, tokens: int, sms: int, ms: float) -> None:
        super().__init__()
        self._sms, self._act = sms, model.activation
        rows = tokens * model.top_k // 2
        shape = (rows, model.hidden, model.ffn, _EXPERTS)
        device = torch.device("cuda", torch.cuda.current_device())
        p = experts(shape, balanced(rows, _EXPERTS), device)
        self._x_SD, self._w1, self._offsets = p.x_SD, p.w1, p.offsets
        self._stream.wait_stream(torch.cuda.current_stream())
        self._launches = 1
        # One more launch than that: the last one must still run when the push ends.
        self._launches = 1 + math.ceil(ms / self.trial())

    def launch(self) -> None:
        from phalanx.kernels.sm90.experts.fc1_act import fc1_act

        options: dict[str, Any] = dict(keep_h=False, options=LaunchOptions(self._sms))
        for _ in range(self._launches):
            fc1_act(self._x_SD, self._w1, self._offsets, self._act, **options)
