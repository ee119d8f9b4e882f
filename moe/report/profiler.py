"""torch.profiler over a window of steps.

The code names the stages of the data flow with `record_function`: data, moe/route, moe/dispatch,
moe/experts, moe/combine, attention/core, optimizer, checkpoint. The trace shows them, and each
step as `step N`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class Profiler:
    """Records steps first..last and writes a Chrome trace to the run folder.

    Args:
        window: [first, last] of run.profile; empty, or on a rank that does not record.
        facts: metadata of the run, stored in the trace under `phalanx` with the steps.
        done: steps done before this run, which may be more than `first`.
        report: prints a line on the trace. A trace that cannot be written does not end the run.
    """

    def __init__(
        self,
        window: list[int],
        folder: Path,
        facts: dict[str, Any],
        done: int,
        report: Callable[[str], None],
    ) -> None:
        self._first, self._last = window if window else (0, -1)
        self._folder, self._facts, self._done, self._report = folder, facts, done, report
        self._profile: Any = None
        self._span: Any = None

    def __enter__(self) -> "Profiler":
        self.step(self._done)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def step(self, done: int) -> None:
        """Note that step `done` has ended."""
        self._done = done
        if done >= self._last:
            self._stop()
        elif self._profile is not None or done + 1 >= self._first:
            self._start()

    def _start(self) -> None:
        if self._profile is None:
            self._record()
        self._end_span()
        self._span = record_function(f"step {self._done + 1}")
        self._span.__enter__()

    def _end_span(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def _record(self) -> None:
        # Kineto would print an error about every host without a GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.__enter__()
        self._first = self._done + 1

    def _stop(self) -> None:
        if self._profile is None:
            return
        self._end_span()
        facts = self._facts | {"steps": [self._first, self._done]}
        self._profile.add_metadata_json("phalanx", json.dumps(facts))
        self._profile.__exit__(None, None, None)
        path = self._folder / f"trace_{self._first}_{self._done}.json.gz"
        try:
            self._profile.export_chrome_trace(str(path))
            self._report(f"wrote {path}, for ui.perfetto.dev")
        except (OSError, RuntimeError) as error:
            self._report(f"warning: {path} cannot be written: {error}")
        self._profile = None
