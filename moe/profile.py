"""torch.profiler over a window of steps, with the named ranges of the data flow (moe/route, moe/experts, ...)."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class Profiler:
    """Records steps first..last on the main rank and writes a Chrome trace to the run folder."""

    def __init__(self, window: list[int], folder: Path, is_main: bool) -> None:
        self._first, self._last = (window[0], window[1]) if window else (0, -1)
        self._folder, self._active = folder, is_main and bool(window)
        self._profile: Any = None

    def __enter__(self) -> "Profiler":
        if self._active and self._first <= 1:
            self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def step(self, done: int) -> None:
        """Tell that step `done` has ended."""
        if self._active and done + 1 == self._first:
            self._start()
        elif self._profile is not None and done >= self._last:
            self._stop()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.__enter__()

    def _stop(self) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        path = self._folder / f"trace_{self._first}_{self._last}.json.gz"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
