"""Streams of two passes and of the transfers between stages; on a CPU there are none."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Event = torch.cuda.Event | None  # event after work of a stream; None on a CPU

TRANSFERS = 2  # number of the stream for transfers; passes are on 0 and 1


class Streams:
    """Streams of a device, by number."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(3)] if self._cuda else []

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Inside, work is put on a stream."""
        return torch.cuda.stream(self._streams[number]) if self._cuda else nullcontext()

    def event(self) -> Event:
        """Event after the work of the current stream so far."""
        return torch.cuda.current_stream().record_event() if self._cuda else None

    def wait(self, *events: Event) -> None:
        """Have the current stream wait for events."""
        for event in events:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
