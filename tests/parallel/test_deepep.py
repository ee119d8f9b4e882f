"""Transport `deepep` through Megatron-Core, with a stand-in for DeepEP's buffer over gloo."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.dispatch import make_dispatcher
from parallel.exchange import SymmOptions
from parallel.overflow import Budget
from tests.distributed import run_distributed
from tests.parallel.test_dispatch import (
    CPU,
    EXPERTS,
    SLOTS,
    TOKENS,
    Case,
    Result,
    dense,
    experts,
    make_case,
)
from tests.training import _loaded, _train

pytestmark = pytest.mark.dist


class Buffer:
    """What Megatron-Core calls of `deep_ep.Buffer`, as its documentation says."""

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
        handle = SimpleNamespace(mine=wanted[:, self.rank], wanted=wanted, tokens=len(x))
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
    budget, local = Budget(1.0, CPU), EXPERTS // dist.get_world_size()
    how = dict(experts=EXPERTS, slots=SLOTS, budget=budget, symm=SymmOptions(comm_sms=sms))
    own_T, own_E = (slice(rank * n, (rank + 1) * n) for n in (len(case.x_TD) // ranks, local))
    x, prob = (t[own_T].clone().requires_grad_() for t in (case.x_TD, case.prob_TK))
    w = case.w_EDD[own_E].clone().requires_grad_()
    with installed():
        dispatcher = make_dispatcher("deepep", group=group, **how)
        received = dispatcher.dispatch(x, case.idx_TK[own_T], prob)
        out = dispatcher.combine(experts(received, w), received, lambda: torch.zeros_like(x))
        out.backward(case.dout_TD[own_T])
        assert not budget.overflowed(group)
        assert x.grad is not None and prob.grad is not None and w.grad is not None
        result = Result(out.detach(), x.grad, prob.grad, w.grad)
        return result, len(received.plan.row_index_S), Buffer.sms


@pytest.mark.parametrize("kind", ["even", "unequal", "none to the first half", "all to one rank"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_the_dense_statement(ranks: int, kind: str) -> None:
    case = make_case(kind, torch.bfloat16)
    results, rows, _ = zip(*run_distributed(rank_layer, ranks, case), strict=True)
    for name, parts, want in zip(
        Result._fields, zip(*results, strict=True), dense(case), strict=True
    ):
        got = torch.cat(parts)
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < 2e-2, f"{name}: {error:.1e} of the largest entry"
    assert set(rows) == {128}  # as many as are needed, in whole tiles, whatever the budget


def test_every_row_comes_back_on_integers() -> None:
    case = make_case("unequal", torch.bfloat16, integer=True)
    results, _, sms = zip(*run_distributed(rank_layer, 2, case, 12), strict=True)
    for parts, want in zip(zip(*results, strict=True), dense(case), strict=True):
        assert torch.equal(torch.cat(parts).double(), want)
    assert sms == (12, 12) and len(case.x_TD) == TOKENS


def losses(dispatch: str) -> list[float]:
    small = (
        "run.steps=3 run.precision=bf16 run.eval_interval=0 parallel.expert=2 data.micro_batch=2"
    )
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
            make_dispatcher("deepep", group=dist.group.WORLD, **how)
        with installed():
            make_dispatcher("deepep", group=dist.group.WORLD, **how)
    return str(error.value)


def test_what_it_lacks_is_said() -> None:
    package = run_distributed(refusal, 2, torch.bfloat16, False)[0]
    assert package == (
        "parallel.dispatch=deepep cannot run: needs the package deep_ep "
        "(https://github.com/deepseek-ai/DeepEP); set parallel.dispatch=auto"
    )
    assert "moves bf16, not torch.float32" in run_distributed(refusal, 2, torch.float32, True)[0]
