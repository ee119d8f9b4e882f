"""Whole parameters in host memory, for checkpoints: each rank saves and loads as if unsharded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from phalanx.extras.sharded_params.ring import Unit


class WholeParameters:
    """The parameters of the units of a chunk, whole in a context; collective.

    What is loaded into them is in the shards, too, before the optimizer reads those.
    """

    def __init__(self, chunk: Any, units: Sequence[Unit]) -> None:
        self._units = units
        self._places: dict[Tensor, Tensor] = {}  # of parameters in rings; empty outside the context
        self._sync = chunk.start_param_sync
        chunk.start_param_sync = self._start_param_sync
        chunk.module.register_load_state_dict_post_hook(lambda *_: self._keep())
        chunk.whole_parameters = self.context

    @contextmanager
    def context(self) -> Iterator[None]:
        for ring in dict.fromkeys(unit.ring for unit in self._units):
            ring.begin()
        for unit in self._units:
            unit.ring.need(unit.number)
            for p in unit.parameters:
                self._places[p] = p.data
                p.data = p.data.to("cpu", copy=True)
        try:
            yield
        finally:
            self._keep()
            for p, place in self._places.items():
                p.data = place
            self._places.clear()

    def _keep(self) -> None:
        if self._places:
            for unit in self._units:
                unit.keep()

    def _start_param_sync(self, *given: Any, **named: Any) -> None:
        self._keep()  # master weights may have been written back to the parameters
        self._sync(*given, **named)
