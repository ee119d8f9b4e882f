"""Rates of other stacks, fitted to the records that are not held."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from phalanx.configs.records import Published
from phalanx.scripts.lab.peers.simulated import Rates, Run, described, estimate
from phalanx.scripts.lab.peers.stack import is_held

CHOICES: Mapping[str, Sequence[float]] = {
    "early_ms": (5, 7, 9, 11, 12, 13, 14, 15, 16, 18, 20),
    "eager_ms": (3, 5, 7, 8, 9, 10, 11, 12, 13, 15, 17),
    "graphs_ms": (0, 2, 3, 4, 5, 6, 6.5),  # Qwen3-30B by Megatron-Bridge takes 6.6 for all
    "skew": (0, 0.02, 0.04, 0.06),  # 0.01 to 0.05 of our steps
    "cast_bytes": (0, 5, 10, 20, 30, 40, 60, 80),
    "alltoall": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
}
"""Values of each rate that are tried, from what is physically possible."""


def loss(runs: Sequence[Run], rates: Rates) -> float:
    """Mean distance of estimates from published rates, by logarithm; trials count for half."""
    distances = [abs(math.log1p(estimate(run, rates).error)) for run in runs]
    return fmean(d if run.stack.tuned else d / 2 for d, run in zip(distances, runs, strict=True))


def fitted(records: Sequence[Published], start: Rates) -> Rates:
    """The best rates, changed one after the other until none is better; held records are unread."""
    runs = [described(record) for record in records if not is_held(record)]
    best, least = start, loss(runs, start)
    while True:
        before = least
        for name, values in CHOICES.items():
            for value in values:
                trial = replace(best, **{name: value})
                if (found := loss(runs, trial)) < least - 1e-6:
                    best, least = trial, found
        if least == before:
            return best
