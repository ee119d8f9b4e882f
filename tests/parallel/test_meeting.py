"""Ranks that cannot meet say in one line why, and what to set."""

import datetime
import re
import socket
from collections.abc import Iterator

import pytest
import torch

from phalanx.parallel import runtime
from phalanx.parallel.megatron import cpu, weight_grad

LIMIT = datetime.timedelta(seconds=1)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port of this host at which another process listens."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(number))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        yield number


def refusal(rank: int) -> str:
    with pytest.raises(ValueError) as raised:
        runtime._meet(rank, 2, LIMIT)
    (line,) = str(raised.value).splitlines()
    return line


def test_a_port_in_use_is_named_with_what_to_set(port: int) -> None:
    line = refusal(0)
    assert line.startswith(f"port {port} of {socket.gethostname()} is in use, where rank 0 listens")
    for fix in ("set MASTER_PORT", "--standalone", "--rdzv-endpoint HOST:PORT"):
        assert fix in line


def test_a_rank_that_reaches_nobody_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        number = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    line = refusal(1)
    assert f"cannot reach rank 0 at MASTER_ADDR=localhost MASTER_PORT={number}: " in line
    assert line.endswith("set both on every host to those of rank 0")


def test_ranks_without_an_address_are_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert refusal(0).startswith("MASTER_ADDR must be set beside WORLD_SIZE: start with torchrun ")


def test_more_ranks_than_gpus_are_refused_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "install", lambda: False)
    monkeypatch.setattr(weight_grad, "install", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert runtime.device_here(3) == torch.device("cuda", 3)
    with pytest.raises(ValueError) as raised:
        runtime.device_here(4)
    assert re.fullmatch(
        r"5 or more ranks were started on \S+, and torch sees 4 of its GPUs: start with torchrun "
        r"--nproc-per-node 4",
        str(raised.value),
    )
