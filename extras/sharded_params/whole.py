"""Whole parameters in host memory, for checkpoints: each rank saves and loads as if unsharded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from phalanx.extras.sharded_params.ring import Unit


@contextmanager
def whole_parameters(units: Sequence[Unit]) -> Iterator[None]:
    """Inside, parameters are whole; the shards keep what they have become. Collective."""
    places: dict[Tensor, Tensor] = {}  # of parameters in rings
    for ring in dict.fromkeys(unit.ring for unit in units):
        ring.begin()
    for unit in units:
        unit.ring.need(unit.number)
        for p in unit.parameters:
            places[p] = p.data
            p.data = p.data.to("cpu", copy=True)
    try:
        yield
    finally:
        for unit in units:
            unit.keep()
        for p, place in places.items():
            p.data = place
