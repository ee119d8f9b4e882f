"""A model of the exchanges of `parallel.dispatcher.rail.gin_kernel`, in random orders of events.

Each CTA copies its part into a place of the sending window, posts a put with a signal, waits for
the signal of its node and wave, and copies out; the next exchange of a node begins when all of its
CTAs have ended. The network delivers what is posted in any order, and reads its source only then:
signals are weak. Empty parts have a signal alone.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

import pytest


class Protocol(NamedTuple):
    """The kernel's constants."""

    places: int = 2
    signals: int = 2
    """Signals of a node and wave: one for each place."""


class Exchanged(RuntimeError):
    """A CTA read what does not belong to its exchange."""


def run(protocol: Protocol, seed: int, *, nodes: int, waves: int, exchanges: int) -> int:
    """Run all exchanges of all nodes; returns the number of parts that were read."""
    random, read = Random(seed), 0
    sent: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
    """Contents of the sending windows: by node, place, destination and wave."""
    received: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
    """Contents of the receiving windows: by node, place, source and wave."""
    signals: dict[tuple[int, int, int, int], int] = {}
    posted: list[Callable[[], None]] = []

    def empty(node: int, peer: int, wave: int, u: int) -> bool:
        return Random(f"{node} {peer} {wave} {u} {seed}").random() < 0.3

    def put(node: int, peer: int, wave: int, u: int) -> None:
        place, signal = u % protocol.places, (peer, u % protocol.signals, node, wave)
        if not empty(node, peer, wave, u):
            received[peer, place, node, wave] = sent[node, place, peer, wave]
        signals[signal] = signals.get(signal, 0) + 1

    def cta(node: int, peer: int, wave: int, u: int) -> Iterator[None]:
        nonlocal read
        place = u % protocol.places
        sent[node, place, peer, wave] = (node, peer, wave, u)
        yield
        posted.append(lambda: put(node, peer, wave, u))
        yield
        signal = (node, u % protocol.signals, peer, wave)
        while signals.get(signal, 0) < u // protocol.signals + 1:
            yield
        yield
        if not empty(peer, node, wave, u):
            if received.get((node, place, peer, wave)) != (peer, node, wave, u):
                raise Exchanged(f"node {node}, exchange {u}, wave {wave} of node {peer}")
            read += 1

    def started(node: int, u: int) -> list[Iterator[None]]:
        return [cta(node, m, w, u) for m in range(nodes) if m != node for w in range(waves)]

    at = [0] * nodes
    running = [started(node, 0) for node in range(nodes)]
    while any(running):
        if posted and random.random() < 0.2:
            posted.pop(random.randrange(len(posted)))()
            continue
        node = random.choice([n for n in range(nodes) if running[n]])
        step = random.choice(running[node])
        if next(step, step) is step:
            running[node].remove(step)
        if not running[node] and at[node] + 1 < exchanges:
            at[node] += 1
            running[node] = started(node, at[node])
    return read


@pytest.mark.parametrize("nodes", [2, 3])
def test_parts_are_read_after_they_arrive_and_before_they_are_overwritten(nodes: int) -> None:
    """Over many exchanges, as replays of a graph, with empty parts."""
    for seed in range(40):
        read = run(Protocol(), seed, nodes=nodes, waves=2, exchanges=12)
        assert read > 0.5 * nodes * (nodes - 1) * 2 * 12


@pytest.mark.parametrize("wrong", [Protocol(places=1), Protocol(signals=1)])
def test_one_place_or_one_signal_would_not_do(wrong: Protocol) -> None:
    with pytest.raises(Exchanged):
        for seed in range(200):
            run(wrong, seed, nodes=3, waves=2, exchanges=12)
