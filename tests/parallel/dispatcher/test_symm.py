"""The one-sided transport where no GPU is needed: what it tells, and where it cannot run."""

import contextlib
import functools
import inspect
import traceback
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phalanx.kernels.sm90.exchange import peer_buffers
from phalanx.kernels.sm90.exchange.peer_buffers import SLOTS
from phalanx.moe.layer import MoE
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher import exchange as exchanges
from phalanx.parallel.dispatcher import symm, transfers
from phalanx.parallel.dispatcher.base import TokenChoices
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Transport
from tests.parallel.dispatcher.test_base import dispatcher_of
from tests.support.distributed import run_distributed


def _connection(report: list[int], at_barrier: bool) -> Any:
    """Connection of an exchange whose kernels have left a report."""
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.exchange.exchange import Exchange

    connection: Any = object.__new__(exchanges.Connection)
    connection.group, connection.exchange = dist.group.WORLD, object.__new__(Exchange)
    written = torch.tensor(report, dtype=torch.int32)
    connection.exchange._buffers = [SimpleNamespace(report=written)]
    connection._at_barrier = torch.tensor([at_barrier], dtype=torch.int32)
    return connection


def _missing(cases: list[tuple[list[int], bool, bool]]) -> list[str]:
    told = []
    for report, at_barrier, failed in cases:
        connections = Connections()
        connections.get("a", functools.partial(_connection, report, at_barrier))
        with mock.patch.object(exchanges, "_has_failed", lambda failed=failed: failed):
            told.append(connections.missing())
    return told


def test_who_did_not_come_is_named() -> None:
    nobody, late = [0, 0, 0, 0], [2, 41, 39, 0]
    cases = [  # report, whether the device is in the barrier, and whether it has failed
        (nobody, False, False),
        (late, False, True),
        (nobody, True, True),
        (nobody, False, True),  # an error of another kernel
        (nobody, True, False),  # an error of the host while the barrier waits
    ]
    assert run_distributed(_missing, 2, cases)[0] == [
        "",
        "rank 1 has not reached exchange 41 of experts, only 39",
        "a rank has not reached the barrier of this step",
        "",
        "",
    ]


def _made(name: str) -> str:
    given = dict(experts=4, slots=TokenChoices(2, 2), budget=Budget(1.0, torch.device("cpu")))
    try:
        return type(dispatcher_of(name, dist.group.WORLD, **given)).__name__
    except ValueError as error:
        return str(error)


def test_without_gpus_auto_takes_collectives_and_symm_is_refused() -> None:
    assert run_distributed(_made, 2, "auto") == ["AllToAll"] * 2
    (told, _) = run_distributed(_made, 2, "symm")
    assert "needs CUDA" in told and "set parallel.dispatch=auto" in told


class _Saves(torch.autograd.Function):
    """Save tensors; the backward pass appends what it finds instead of them to `found`."""

    @staticmethod
    def forward(
        ctx: Any, found: list[torch.Tensor], x: torch.Tensor, *saved: torch.Tensor
    ) -> torch.Tensor:
        ctx.found = found
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # each access calls the hooks
        ctx.found += saved
        return None, grad, *[None] * len(saved)


def test_saved_rows_are_resent_and_tensors_that_share_their_memory_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, again = torch.randn(4, 4), torch.randn(4, 4)
    call: Any = SimpleNamespace(
        saved=lambda _: None,
        resent_rows=lambda: again,
    )
    resent = []
    monkeypatch.setattr(transfers, "resend", lambda _, all_sms: resent.append(all_sms))
    found: list[torch.Tensor] = []
    others = rows.clone(), rows.T, rows[:, :2], rows.view(2, 8)
    with transfers.saving(rows, call):
        x = torch.zeros(1, requires_grad=True)
        _Saves.apply(found, x, rows.view_as(rows), *others).sum().backward()
    assert found[0] is again and resent == [True]
    for got, other in zip(found[1:], others, strict=True):
        assert torch.equal(got, other)


@pytest.mark.parametrize("size", [1, 4, 6, 7])
def test_blocks_of_side_data_come_back_as_they_were(size: int) -> None:
    blocks = torch.arange(3 * size, dtype=torch.int32).view(3, size)
    padded = peer_buffers.padded(blocks)
    assert padded.shape[1] % 4 == 0
    memory = torch.cat((padded.flatten(), torch.full((9,), -1, dtype=torch.int32)))
    assert torch.equal(peer_buffers.unpadded(memory.view(torch.uint8), 3, size), blocks)


def test_buffers_of_all_slots_lie_in_the_memory_one_after_the_other() -> None:
    layout = peer_buffers.BufferLayout(ranks=3, tokens=5, hidden=24, slots=2)
    memory = torch.full((layout.total,), 255, dtype=torch.uint8)
    layout.clear(memory)
    flags = memory[: 4 * peer_buffers.FLAGS].view(torch.int32)
    assert flags[peer_buffers.ALLOWED :].tolist() == [1] * peer_buffers.MAX_RANKS
    assert not flags[: peer_buffers.ALLOWED].any()
    for slot in range(peer_buffers.SLOTS):
        rows, side = layout.rows(memory, slot), layout.side(memory, slot)
        assert rows.shape == (3 * 5, 24) and not rows.any() and not side.any()
        assert len(side) >= 3 * (8 * 5 * 2 + peer_buffers.SIDE_ALIGN)
        rows.fill_(slot + 1)
        side.fill_(slot + 1)
    for slot in range(peer_buffers.SLOTS):
        assert (layout.rows(memory, slot) == slot + 1).all()
        assert (layout.side(memory, slot) == slot + 1).all()
    assert flags.sum() == peer_buffers.MAX_RANKS


def test_a_push_is_few_frames_from_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven from the layer's forward to the call of the compiled kernel, which `launch` makes."""
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.exchange import exchange, push

    def program_called(*_: Any) -> None:
        frames = [frame.name for frame in traceback.extract_stack()]
        calls.append(frames[frames.index(test_a_push_is_few_frames_from_the_layer.__name__) + 1 :])

    def launch(*arguments: Any, **named: Any) -> None:
        program_called(*arguments)

    calls: list[list[str]] = []
    T, K, D = 4, 2, 8
    stand_in: Any = object.__new__(exchange.Exchange)
    stand_in.ranks, stand_in.tokens, stand_in._stream = 2, T, None
    stand_in._options, stand_in._memory = exchanges.SymmOptions(), torch.empty(0)
    stand_in._next = stand_in._started = stand_in._waited = 0
    flags = torch.zeros(2, dtype=torch.int64)
    buffers = peer_buffers.PeerBuffers(*[flags] * 5, rank=0, limit_ms=1)
    rows_ND = torch.zeros(2 * T, D, dtype=torch.bfloat16)
    stand_in._buffers, stand_in._rows = [buffers] * SLOTS, [rows_ND] * SLOTS
    monkeypatch.setattr(symm, "exchange_of", lambda *_: stand_in)
    monkeypatch.setattr(push, "launch", launch)
    monkeypatch.setattr(push, "require", lambda *_, **__: None)
    device = SimpleNamespace(multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    event = SimpleNamespace(record=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    planner: Any = SimpleNamespace(check=lambda *_: None)
    group: Any = None
    made: Any = dict(experts=4, local=2, local_slots=2, backend="torch", connections=Connections())
    transport = symm.Symm(DispatchContext(Transport("symm", "asked for"), group, planner, **made))
    idx = torch.zeros(T, K, dtype=torch.int32)
    transport.send_tokens(torch.zeros(T, D).bfloat16(), idx, torch.ones(T, K))
    assert calls == [
        ["send_tokens", "apply", "forward", "start", "push", "launch", "program_called"]
    ]
    assert len(calls[0]) <= 7
    assert "self._through_experts(" in inspect.getsource(MoE._forward)
    assert "self.dispatcher.send_tokens(" in inspect.getsource(MoE._through_experts)
