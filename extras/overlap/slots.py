"""Slots of a step: the forward pass and the backward pass that a pipeline stage has in each.

    slot     0     1     2     3     4     5     6     7     8
    stage 0  F0    F1    F2    F3 B0 F4 B1 F5 B2    B3    B4    B5
    stage 1        F0    F1 B0 F2 B1 F3 B2 F4 B3 F5 B4    B5

A pass depends on passes of earlier slots alone, so the two of a slot run beside each other; for
that a stage has more micro-batches in flight than with one forward, one backward. The step is as
long: each stage idles for P - 1 of the M + P - 1 times that a forward and a backward pass take, or
for (P - 1) / V with V chunks. As in Megatron-Core's interleaved schedule (arXiv 2104.04473), a
stage runs P micro-batches on a chunk before it turns to the next chunk.
"""

from typing import NamedTuple


class Pass(NamedTuple):
    """A forward pass, or the backward pass of the same micro-batch."""

    number: int  # number of the forward pass among those of the stage
    chunk: int
    microbatch: int


class Slots:
    """Slots of the `stage` from 0; with several chunks `microbatches` is a multiple of `stages`."""

    def __init__(self, stage: int, stages: int, chunks: int, microbatches: int) -> None:
        self._stage, self._stages, self._chunks = stage, stages, chunks
        self._passes = microbatches * chunks
        self._ahead = passes_ahead(stage, stages, chunks)
        self.microbatches = microbatches

    def __len__(self) -> int:
        """Number of slots of the step, the same on all stages."""
        return self._passes + passes_ahead(0, self._stages, self._chunks)

    def forward(self, slot: int) -> Pass | None:
        k = slot - self._stage
        return self._pass(k, self._chunk(k)) if 0 <= k < self._passes else None

    def backward(self, slot: int) -> Pass | None:
        k = slot - self._stage - self._ahead
        return self._pass(k, self._chunks - 1 - self._chunk(k)) if 0 <= k < self._passes else None

    def first(self, pass_: Pass) -> bool:
        return self._stage == 0 and pass_.chunk == 0

    def last(self, pass_: Pass) -> bool:
        return self._stage == self._stages - 1 and pass_.chunk == self._chunks - 1

    def reduces(self, pass_: Pass) -> bool:
        """True if the backward pass is the last one of its chunk."""
        return pass_.microbatch == self.microbatches - 1

    def _chunk(self, k: int) -> int:
        return k // self._stages % self._chunks

    def _pass(self, k: int, chunk: int) -> Pass:
        group, place = k // (self._stages * self._chunks), k % self._stages
        number = (group * self._chunks + chunk) * self._stages + place
        return Pass(number, chunk, group * self._stages + place)


def passes_ahead(stage: int, stages: int, chunks: int) -> int:
    """Number of forward passes of a stage before the one beside its first backward pass."""
    return stages * (chunks + 1) - 1 - 2 * stage
