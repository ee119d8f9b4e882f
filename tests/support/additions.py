"""Activations, a transport, a backend, an optimizer and a recipe that users could add."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.schema import PrecisionConfig
from phalanx.configs.tables.activations import ACTIVATIONS, ActivationFacts
from phalanx.configs.tables.backends import EXPERT_BACKENDS, ExpertBackend
from phalanx.configs.tables.optimizers import OPTIMIZERS, OptimizerFacts
from phalanx.configs.tables.recipes import RECIPES, RecipeFacts
from phalanx.configs.tables.transports import TRANSPORTS, TransportFacts
from phalanx.kernels.elementwise import sums
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import Backend, Options
from phalanx.kernels.expert_mlp.calls import RowsCall
from phalanx.kernels.expert_mlp.torch_grouped import Grouped
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.registry import Facts
from phalanx.parallel.dispatcher.costs import GroupTopology, Links, TransportCosts
from phalanx.parallel.dispatcher.transport_class import (
    DispatchContext,
    Dispatcher,
    Planner,
    Received,
)
from phalanx.parallel.megatron.adam import AdamW, Setup, StepNumbers

# --- ReGLU, and ReLU without a gate (arXiv 2002.05202) --------------------------------------------


def relu(x: Tensor, act: Activation) -> Tensor:
    return x.relu()


def relu_slope(x: Tensor, act: Activation) -> Tensor:
    return (x > 0).to(x.dtype)


_FUNCTIONS = dict(
    value="tests.support.additions:relu",
    slope="tests.support.additions:relu_slope",
    cute="tests.kernels.sm90.relu:relu",
)
ADDED_ACTIVATIONS = {
    "reglu": ActivationFacts(True, "max(gate, 0) * up (arXiv 2002.05202)", **_FUNCTIONS),
    "relu": ActivationFacts(False, "max(h, 0), not gated", **_FUNCTIONS),
}

# --- every rank broadcasts all its rows -----------------------------------------------------------


class Broadcasts(Dispatcher):
    """One broadcast per rank, in dispatch and in combine."""

    no_overlap = "broadcasts are over when they return"

    def __init__(self, group: dist.ProcessGroup, plan: Planner) -> None:
        self._group, self._plan = group, plan

    @classmethod
    def build(cls, context: DispatchContext) -> "Broadcasts":
        return cls(context.group, context.plan)

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        rows = Links(reach.ranks - 1, 0)
        return TransportCosts(
            rows, 3 * rows, saved=reach.received, backward=5, buffers=2 * reach.received
        )

    def send_tokens(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Any:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        rows_ND, prob_NK = (_Spread.apply(t, self._group) for t in (x_TD, topk_prob_TK))
        return rows_ND, _all_rows(topk_idx_TK, self._group), prob_NK

    def receive_tokens(self, sent: Any) -> Received:
        rows_ND, idx_NK, prob_NK = sent
        return Received(rows_ND, self._plan(idx_NK, prob_NK))

    def receive_sums(
        self, sent: Tensor, received: Received, addends: Sequence[Tensor] = ()
    ) -> Tensor:
        return sums.plus(_Collect.apply(sent, self._group), addends)


def _all_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks in rank order."""
    parts = [x.contiguous() if r == group.rank() else torch.empty_like(x) for r in ranks(group)]
    for r, part in enumerate(parts):
        dist.broadcast(part, group=group, group_src=r)
    return torch.cat(parts)


def _sum_of_blocks(x_ND: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum in fp32 of this rank's blocks of all ranks' rows."""
    every = _all_rows(x_ND, group).unflatten(0, (group.size(), group.size(), -1))
    return every[:, group.rank()].sum(0, dtype=torch.float32).to(x_ND.dtype)


def ranks(group: dist.ProcessGroup) -> range:
    return range(group.size())


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_of_blocks(grad, ctx.group), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_of_blocks(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_rows(grad, ctx.group), None


ADDED_TRANSPORTS = {
    "broadcasts": TransportFacts(
        "tests.support.additions:Broadcasts", "a broadcast for each rank", auto=False
    )
}


class OnceANode(Broadcasts):
    """Costs of a row to each node with one of its experts, and from there to the ranks."""

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        rows = reach.once_a_node
        return TransportCosts(
            rows, rows, saved=int(reach.tokens * reach.wanted_ranks), pipelined=True
        )


COUNTING_TRANSPORTS = {
    "broadcasts": TransportFacts(
        "tests.support.additions:OnceANode",
        "a broadcast for each rank, of rows that the host counts",
        auto=False,
        takes_sms=True,
        graph=False,
    )
}
"""Entry of a transport that no graph captures, and that has SMs, no FP8 and no replicas."""


# --- a backend of the experts -------------------------------------------------------------------


class Counted(Grouped):
    """`torch`, which counts its GEMMs by rows."""

    calls = 0

    def rows(self, call: RowsCall) -> Tensor:
        Counted.calls += 1
        return super().rows(call)


def counted(options: Options) -> Backend:
    return Counted()


def unavailable(facts: Facts) -> str | None:
    return None if facts.device == "cpu" else "counts on a CPU"


ADDED_BACKENDS = {
    "counted": ExpertBackend(
        "tests.support.additions:unavailable",
        "`torch` with a counter",
        auto=False,
        provider="tests.support.additions:counted",
        pads_rows_to=4,
        emulates=True,
    )
}

# --- Lion (arXiv 2302.06675) ----------------------------------------------------------------------


class Lion(AdamW):
    """The sign of a mean of momentum and gradient, with one moment."""

    def _moments_of(self, p: Tensor) -> tuple[str, ...]:
        return ("exp_avg",)

    def _update(self, group: dict[str, Any], params: list[Tensor], numbers: StepNumbers) -> None:
        beta1, beta2 = group["betas"]
        for p in params:
            momentum, grad = self.state[p]["exp_avg"], p.grad
            p.mul_(numbers.decay)
            p.sub_(momentum.lerp(grad, 1 - beta1).sign().mul_(numbers.lr))
            momentum.lerp_(grad, 1 - beta2)


class LionSetup(Setup):
    """Lion, which needs no more of the engine than AdamW."""

    kind = Lion


ADDED_OPTIMIZERS = {
    "lion": OptimizerFacts(
        "tests.support.additions:LionSetup", "the sign of momentum (arXiv 2302.06675)", moments=1
    )
}


# --- FP8 in blocks of 128, with gradients in e5m2 -------------------------------------------------


def wide_gradients(p: PrecisionConfig) -> Fp8Block:
    return Fp8Block(grad_format="e5m2", wgrad=p.wgrad)  # type: ignore[arg-type]


ADDED_RECIPES = {
    "fp8_wide": RecipeFacts(
        "e4m3 in blocks of 128, and e5m2 for gradients",
        build="tests.support.additions:wide_gradients",
        switches=("wgrad", "dense", "bf16_first_layers", "bf16_last_layers", "weights"),
        fp8_blocks=True,
    )
}


@contextlib.contextmanager
def added(rank: int = 0) -> Iterator[None]:
    """Register them in the tables of this process."""
    with (
        mock.patch.dict(ACTIVATIONS, ADDED_ACTIVATIONS),
        mock.patch.dict(TRANSPORTS, ADDED_TRANSPORTS),
        mock.patch.dict(EXPERT_BACKENDS, ADDED_BACKENDS),
        mock.patch.dict(OPTIMIZERS, ADDED_OPTIMIZERS),
        mock.patch.dict(RECIPES, ADDED_RECIPES),
    ):
        yield
