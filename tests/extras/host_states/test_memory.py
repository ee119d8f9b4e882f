"""Host memory of states: its size and contents, what a fork sees, and what is impossible."""

import faulthandler
import os
import signal

import pytest

from phalanx.extras.host_states.memory import zeros


def test_zeros_of_an_exact_size() -> None:
    for size in (0, 1, 4096, 1_000_001):
        held = zeros(size, pinned=False, owner=held_by)
        assert held.numel() == size and not held.any()
        assert held.untyped_storage().nbytes() == max(size, 1)
    held.fill_(3)
    assert int(held.sum()) == 3 * held.numel()


def held_by() -> None: ...


def test_a_fork_does_not_see_it() -> None:
    held = zeros(1 << 20, pinned=False, owner=held_by)
    held.fill_(1)
    if (child := os.fork()) == 0:
        faulthandler.disable()
        _ = int(held[0])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
    assert int(held[-1]) == 1


def test_more_than_there_is_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^cannot have .* host memory .*: set optim") as error:
        zeros(1 << 60, pinned=False, owner=held_by)
    assert "\n" not in str(error.value)
