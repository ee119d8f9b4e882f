"""Transport `deepep` through Megatron-Core, with a stand-in for DeepEP's buffer over gloo."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from tests.parallel.dispatcher.budgets import overflowed
from tests.parallel.dispatcher.test_base import (
    CPU,
    EXPERTS,
    SLOTS,
    TOKENS,
    Case,
    Result,
    assert_exact,
    assert_near,
    dispatcher_of,
    make_case,
    run_layer,
)
from tests.support.distributed import run_distributed
from tests.support.training import _loaded, _train

pytestmark = pytest.mark.dist


class Buffer:
    """Methods of `deep_ep.Buffer` that Megatron-Core calls, as documented there."""

    sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        size = SimpleNamespace()
        size.get_nvl_buffer_size_hint = size.get_rdma_buffer_size_hint = lambda *_: 0
        return size

    get_combine_config = get_dispatch_config

    @classmethod
    def set_num_sms(cls, sms: int) -> None:
        cls.sms = sms

    def get_dispatch_layout(self, idx: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        assert idx.dtype == torch.int64
        named = torch.stack([(idx == e).any(1) for e in range(num_experts)])
        wanted_TR = named.view(self.ranks, -1, len(idx)).any(1).T
        return wanted_TR.sum(0), None, named.sum(1), wanted_TR, None

    def dispatch(
        self,
        x: Tensor,
        *,
        handle: Any = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous()
        if handle is not None:
            return self._all(x)[handle.mine], None, None, None, None, None
        assert is_token_in_rank is not None and topk_idx is not None and topk_weights is not None
        assert num_tokens_per_expert is not None and topk_weights.dtype == torch.float32
        local = len(num_tokens_per_expert) // self.ranks
        wanted = self._all(is_token_in_rank.contiguous())
        handle = SimpleNamespace(mine=wanted[:, self.rank], tokens=len(x))
        idx, weights = (self._all(t)[handle.mine] for t in (topk_idx, topk_weights))
        here = idx // local == self.rank
        idx = torch.where(here, idx - self.rank * local, -1)
        counts = [int((idx == e).sum()) for e in range(local)]
        return self._all(x)[handle.mine], idx, torch.where(here, weights, 0), counts, handle, None

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        assert x.is_contiguous()
        return self._back(x, handle), self._back(topk_weights, handle), None

    def _all(self, x: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(found, x.detach(), group=self.group)
        return torch.cat(found)

    def _back(self, x: Tensor | None, handle: Any) -> Tensor | None:
        if x is None:
            return None
        full = x.new_zeros(self.ranks * handle.tokens, x.shape[1])
        full[handle.mine] = x
        own = slice(self.rank * handle.tokens, (self.rank + 1) * handle.tokens)
        parts = self._all(full).unflatten(0, (self.ranks, -1))[:, own]
        return parts.float().sum(0).to(x.dtype)


@contextmanager
def installed() -> Iterator[None]:
    """The package is there, as far as Megatron-Core can tell."""
    fused_a2a = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.Buffer, utils.EventHandle, utils.EventOverlap = Buffer, None, None  # type: ignore[attr-defined]
    package.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    try:
        importlib.reload(fused_a2a)
        yield
    finally:
        del sys.modules["deep_ep"], sys.modules["deep_ep.utils"]
        importlib.reload(fused_a2a)


def rank_layer(case: Case, sms: int = 0) -> tuple[Result, int, int]:
    """This rank's part; then expert rows that were kept, and SMs."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    tokens, budget = len(case.x_TD) // ranks, Budget(1.0, CPU)
    own = slice(rank * tokens, (rank + 1) * tokens)
    how = dict(experts=EXPERTS, slots=SLOTS, budget=budget, symm=SymmOptions(comm_sms=sms))
    with installed():
        dispatcher = dispatcher_of("deepep", group, **how)
        result = run_layer(dispatcher, case, rank, ranks, within=nullcontext)
        received = dispatcher.dispatch(case.x_TD[own], case.idx_TK[own], case.prob_TK[own])
        sums = torch.zeros_like(received.rows_ND)
        out = dispatcher.combine(sums, received, case.x_TD[own])
        assert torch.equal(out, case.x_TD[own])
        assert not overflowed(budget, group)
        return result, len(received.plan.row_index_S), Buffer.sms


def whole(results: Sequence[Result]) -> Result:
    return Result(*map(torch.cat, zip(*results, strict=True)))


@pytest.mark.parametrize("kind", ["even", "unequal", "none to the first half", "all to one rank"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_the_dense_statement(ranks: int, kind: str) -> None:
    case = make_case(kind, torch.bfloat16)
    results, rows, _ = zip(*run_distributed(rank_layer, ranks, case), strict=True)
    assert_near(whole(results), case)
    assert set(rows) == {128}  # as many as are needed, in whole tiles, whatever the budget


def test_every_row_comes_back_on_integers() -> None:
    case = make_case("unequal", torch.bfloat16, integer=True)
    results, _, sms = zip(*run_distributed(rank_layer, 2, case, 12), strict=True)
    assert_exact(whole(results), case)
    assert sms == (12, 12) and len(case.x_TD) == TOKENS


def losses(dispatch: str) -> list[float]:
    small = "run.steps=3 precision=bf16 run.eval_interval=0 parallel.expert=2 data.micro_batch=2"
    overrides = ["model=tiny", *small.split(), "data.sequence_length=32", "data.global_batch=4"]
    with installed():
        made = _train(_loaded(*overrides, f"parallel.dispatch={dispatch}"))
    return [step["loss"] for step in made.records if "grad_norm" in step]


def test_a_model_trains_as_with_collectives() -> None:
    theirs, ours = (run_distributed(losses, 2, name)[0] for name in ("alltoall", "deepep"))
    assert len(ours) == 3 and ours == pytest.approx(theirs, rel=1e-2)
    assert ours[0] == theirs[0]  # sums of two ranks have one order


def refusal(dtype: torch.dtype, there: bool) -> str:
    how = dict(experts=EXPERTS, slots=SLOTS, budget=Budget(1.0, CPU), dtype=dtype)
    with pytest.raises(ValueError) as error:
        if not there:
            dispatcher_of("deepep", dist.group.WORLD, **how)
        with installed():
            dispatcher_of("deepep", dist.group.WORLD, **how)
    return str(error.value)


def test_what_it_lacks_is_said() -> None:
    package = run_distributed(refusal, 2, torch.bfloat16, False)[0]
    assert package == (
        "parallel.dispatch=deepep cannot run in the group of 2 ranks from rank 0: needs the "
        "package deep_ep (https://github.com/deepseek-ai/DeepEP); set parallel.dispatch=auto"
    )
    assert "moves bf16, not torch.float32" in run_distributed(refusal, 2, torch.float32, True)[0]
