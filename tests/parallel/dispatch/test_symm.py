"""The one-sided transport where no GPU is needed: what it tells, and where it cannot run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.dispatch import exchange as exchanges
from phalanx.parallel.dispatch import symm
from phalanx.parallel.dispatch.base import Slots
from phalanx.parallel.dispatch.capacity import Budget
from tests.parallel.dispatch.test_base import dispatcher_of
from tests.support.distributed import run_distributed


def _exchange(report: list[int]) -> Any:
    return SimpleNamespace(_report=torch.tensor(report, dtype=torch.int32), group=dist.group.WORLD)


def _missing() -> list[str]:
    told = []
    for report in ([0, 0, 0, 0], [2, 41, 39, 0]):
        exchange = _exchange(report)
        exchange.missing = lambda e=exchange: exchanges.Exchange.missing(e)
        exchanges._EXCHANGES = {("a",): exchange}
        told.append(exchanges.missing())
    exchanges._EXCHANGES = {}
    return told


def test_who_did_not_come_is_named() -> None:
    nobody, somebody = run_distributed(_missing, 2)[0]
    assert nobody == ""
    assert somebody == "rank 1 has not reached exchange 41 of experts, only 39"


def _made(name: str) -> str:
    given = dict(experts=4, slots=Slots(2, 2), budget=Budget(1.0, torch.device("cpu")))
    try:
        return type(dispatcher_of(name, dist.group.WORLD, **given)).__name__
    except ValueError as error:
        return str(error)


def test_without_gpus_auto_takes_collectives_and_symm_is_refused() -> None:
    assert run_distributed(_made, 2, "auto") == ["AllToAll"] * 2
    (told, _) = run_distributed(_made, 2, "symm")
    assert "needs CUDA" in told and "set parallel.dispatch=auto" in told


@pytest.mark.parametrize("size", [1, 4, 6, 7])
def test_blocks_of_side_data_come_back_as_they_were(size: int) -> None:
    blocks = torch.arange(3 * size, dtype=torch.int32).view(3, size)
    padded = symm._padded(blocks)
    assert padded.shape[1] % 4 == 0
    memory = torch.cat((padded.flatten(), torch.full((9,), -1, dtype=torch.int32)))
    assert torch.equal(symm._blocks(memory.view(torch.uint8), 3, size), blocks)
