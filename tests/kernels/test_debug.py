"""PHALANX_DEBUG=1: ids and places that are taken at their word without it are errors in a line."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, is_debugging
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.functional.module import GroupedMLP
from phalanx.kernels.routing.plan import make_plan
from phalanx.parallel.dispatcher.base import TokenChoices, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.transport import LOCAL
from tests.kernels.problems import ACTIVATIONS, Problem, make
from tests.support.sync_free import sync_free

L, D, K, T = 4, 16, 2, 5


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_DEBUG", "1")


def routing(bad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts a token and an empty slot; token 3 has a bad id in slot 1."""
    idx = torch.tensor([[0, 1], [2, 3], [-1, 0], [1, bad], [3, 2]])
    return idx, torch.full((T, K), 0.5)


def by_module(bad: int) -> None:
    idx, prob = routing(bad)
    GroupedMLP(L, D, 8, K)(torch.randn(1, T, D), idx[None], prob[None])


def by_plan(bad: int) -> None:
    idx, prob = routing(bad)
    make_plan(idx.int(), prob, first_expert=0, local_experts=2, rows=T * K, experts=L)


def by_transport(bad: int) -> None:
    budget = Budget(1.0, torch.device("cpu"))
    local = make_dispatcher(LOCAL, group=None, experts=L, slots=TokenChoices(K, K), budget=budget)
    idx, prob = routing(bad)
    local.dispatch(torch.randn(T, D), idx.int(), prob)


@pytest.mark.parametrize("bad", [L, -2, 1 << 20])
@pytest.mark.parametrize("call", [by_module, by_plan, by_transport])
def test_an_id_that_no_expert_has(
    call: Callable[[int], None], bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(bad)  # counts as none
    monkeypatch.setenv("PHALANX_DEBUG", "1")
    with pytest.raises(ValueError) as error:
        call(bad)
    place = "[0, 3, 1]" if call is by_module else "[3, 1]"
    assert str(error.value) == (
        f"topk_idx{place} is {bad}, not -1 to 3: choose an expert from 0 to 3, or -1 for none"
    )
    for good in (-1, L - 1):
        call(good)


@pytest.mark.parametrize("bad", [L, -2, 1 << 31, (1 << 32) + 1, -(1 << 32) + 1, -(1 << 63)])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_bad_id_adds_nothing_without_the_switch(backend: str, bad: int) -> None:
    m, x = GroupedMLP(L, D, 8, K, backend=backend), torch.randn(T, D)
    none = m(x, *routing(-1))
    with sync_free() if backend == "torch" else nullcontext():
        out = m(x, *routing(bad))
    assert torch.equal(out, none)


def test_an_id_is_looked_at_before_it_is_cut_to_32_bits(switched_on: None) -> None:
    with pytest.raises(ValueError, match=rf"is {(1 << 32) + 1}, not -1 to 3"):
        by_module((1 << 32) + 1)


def test_ids_are_integers() -> None:
    idx, prob = routing(0)
    for wrong in (prob, idx > 0):
        with pytest.raises(ValueError, match="topk_idx must hold integers, expert ids, not torch"):
            GroupedMLP(L, D, 8, K)(torch.randn(T, D), wrong, prob)


def call(p: Problem, **other: torch.Tensor) -> None:
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)._replace(**other)
    grouped_mlp(p.x, MLPWeights(p.w1, p.w2), plan, MLPSpec(p.act, "torch"))


def test_a_plan_that_points_nowhere(switched_on: None) -> None:
    p = make(ACTIVATIONS[0], torch.float32)
    used, (N, S) = int(p.offsets[-1]), (len(p.x), len(p.index))
    call(p)

    def other(tensor: torch.Tensor, place: Any, value: int) -> torch.Tensor:
        changed = tensor.clone()
        changed[place] = value
        return changed

    for name, value, message in [
        ("inverse_NK", other(p.inverse, (0, 0), used), rf"inverse_NK\[0, 0\] is {used}, not"),
        ("row_index_S", other(p.index, 1, N), rf"row_index_S\[1\] is {N}, not 0 to {N - 1}"),
        ("offsets", other(p.offsets, -1, S + 1), rf"is {S + 1}, not 0 to {S}: there are {S}"),
        ("offsets", other(p.offsets, 0, S), r"offsets.diff\(\)\[0\] is -\d+, not at least 0"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            call(p, **{name: value})
        assert "\n" not in str(error.value)


def test_nobody_reads_the_padding(switched_on: None) -> None:
    p = make(ACTIVATIONS[0], torch.float32, rows=256)
    index = p.index.clone()
    index[-1] = len(p.x) + 7
    call(p, row_index_S=index)


@pytest.mark.parametrize("value", ["", "0"])
def test_switched_off_nothing_is_read(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_DEBUG", value)
    assert not is_debugging()
    m, given = GroupedMLP(L, D, 8, K, backend="torch"), (torch.randn(T, D), *routing(L))
    with sync_free():
        m(*given)
