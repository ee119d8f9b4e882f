"""Slots of overlapped passes: every pass once, after all that it needs, beside one on the other
stream."""

import pytest

from phalanx.extras.overlap.slots import Pass, Slots, passes_ahead

LAYOUTS = [(1, 1, 5), (2, 1, 6), (2, 1, 1), (4, 1, 3), (5, 1, 7), (2, 2, 4), (3, 2, 6), (3, 3, 9)]
LAYOUTS += [(4, 3, 8), (8, 2, 16)]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), LAYOUTS)
def test_passes_follow_what_they_need(stages: int, chunks: int, microbatches: int) -> None:
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    """Slots of passes, by the chunk of the model and the micro-batch."""
    for stage in range(stages):
        slots = Slots(stage, stages, chunks, microbatches)
        indices: dict[tuple[int, int], int] = {}
        for slot in range(len(slots)):
            passes = slots.forward(slot), slots.backward(slot)
            for pass_, taken in zip(passes, (forward, backward), strict=True):
                if pass_ is None:
                    continue
                which = pass_.chunk * stages + stage, pass_.microbatch
                assert which not in taken
                taken[which] = slot
                assert indices.setdefault(which, pass_.number) == pass_.number
                assert slots.first(pass_) == (which[0] == 0)
                assert slots.last(pass_) == (which[0] == stages * chunks - 1)
            if None not in passes:
                one, other = passes
                assert isinstance(one, Pass) and isinstance(other, Pass)
                assert one.number % 2 != other.number % 2
        assert sorted(indices.values()) == list(range(chunks * microbatches))
        assert slots.forward(len(slots)) is slots.backward(len(slots)) is None
        # Of each chunk micro-batches come in order, as their gradients are summed.
        for chunk in range(stage, stages * chunks, stages):
            for taken in (forward, backward):
                order = [taken[chunk, m] for m in range(microbatches)]
                assert order == sorted(order)
    last = stages * chunks - 1
    assert len(forward) == len(backward) == stages * chunks * microbatches
    for (chunk, microbatch), slot in forward.items():
        # What is sent after a slot is received for the next one.
        assert chunk == 0 or slot == forward[chunk - 1, microbatch] + 1
    for (chunk, microbatch), slot in backward.items():
        earlier = forward if chunk == last else backward
        assert slot == earlier[min(chunk + 1, last), microbatch] + 1


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(1, 1, 4), (4, 1, 16), (3, 2, 9)])
def test_passes_ahead_and_bubble(stages: int, chunks: int, microbatches: int) -> None:
    for stage in range(stages):
        slots = Slots(stage, stages, chunks, microbatches)
        start = next(slot for slot in range(len(slots)) if slots.backward(slot) is not None)
        before = [slot for slot in range(start) if slots.forward(slot) is not None]
        assert len(before) == passes_ahead(stage, stages, chunks)
    both = len(slots) - stages * chunks  # slots with passes of one kind alone come in pairs
    assert both / chunks == microbatches + (stages - 1) / chunks


def test_last_backward_pass_of_a_chunk_reduces() -> None:
    slots = Slots(1, 2, 2, 4)
    passes = [pass_ for i in range(len(slots)) if (pass_ := slots.backward(i)) is not None]
    reducing = [pass_ for pass_ in passes if slots.reduces(pass_)]
    assert [pass_.chunk for pass_ in reducing] == [1, 0]
    for last in reducing:
        assert last == [pass_ for pass_ in passes if pass_.chunk == last.chunk][-1]
