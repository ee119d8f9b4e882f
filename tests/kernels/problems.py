"""Expert-MLP problems with a plan built by plain loops, and a dense reference per token.

Shape legend: N rows of x, K slots per row, L experts, S expert rows, D hidden, F expert width, H
rows of W1.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import wgrad_queue
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, gather_rows, one_group
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.wgrad_queue import Waiting

SWIGLU = Activation("swiglu")
ACTIVATIONS = [
    SWIGLU,
    Activation("swiglu", limit=0.625, offset=0.5),
    Activation("geglu"),
    Activation("geglu", limit=0.625),
    Activation("quick_geglu"),
    Activation("quick_geglu", alpha=1.3, limit=0.625, offset=1.0),
    Activation("squared_relu"),
    Activation("squared_relu", limit=0.625),
]


@dataclass(frozen=True)
class Problem:
    """Inputs of the expert MLP and combine, and the gradient that comes back."""

    act: Activation
    x: Tensor
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    prob: Tensor
    """fp32 [S]."""
    dout: Tensor
    index: Tensor
    offsets: Tensor
    inverse: Tensor

    def to(self, device: str) -> "Problem":
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, Tensor)})


def route(choice: list[list[int]], experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """index [S], offsets [L + 1], inverse [N, K] of expert ids per row and slot (-1: elsewhere)."""
    index, offsets = [], [0]
    inverse = [[-1] * len(slots) for slots in choice]
    for e in range(experts):
        for n, slots in enumerate(choice):
            for k, expert in enumerate(slots):
                if expert == e:
                    inverse[n][k] = len(index)
                    index.append(n)
        offsets.append(len(index))
    index += [0] * (rows - len(index))
    return tuple(torch.tensor(t, dtype=torch.int32) for t in (index, offsets, inverse))


def random_choice(N: int, K: int, experts: list[int], seed: int = 0) -> list[list[int]]:
    """Distinct experts per row, drawn from `experts` and from as many on other ranks."""
    pool = torch.tensor([*experts, *[-1] * max(K, len(experts))])
    g = torch.Generator().manual_seed(seed)
    return [pool[torch.randperm(len(pool), generator=g)[:K]].tolist() for _ in range(N)]


def make(
    act: Activation,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    choice: list[list[int]] | None = None,
    L: int = 4,
    D: int = 32,
    width: int = 24,
    rows: int | None = None,
    integers: bool = False,
) -> Problem:
    """A problem of `choice` (default: random over L experts), `rows` rows (default: as needed)."""
    choice = random_choice(40, 3, list(range(L))) if choice is None else choice
    used = sum(e >= 0 for slots in choice for e in slots)
    index, offsets, inverse = route(choice, L, used if rows is None else rows)
    g = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        if integers:
            return torch.randint(-1, 2, shape, generator=g).to(dtype)
        return (torch.randn(*shape, generator=g) * scale).to(dtype)

    H = act.width(width)
    x, dout = draw(len(choice), D), draw(len(choice), D)
    w1, w2 = draw(L, H, D, scale=D**-0.5), draw(L, D, width, scale=width**-0.5)
    b1, b2 = draw(L, H, scale=0.5), draw(L, D, scale=0.5)
    prob = torch.rand(index.shape, generator=g)
    if integers:
        prob = (prob * 2 + 1).floor()
    return Problem(
        act,
        x,
        w1,
        w2,
        b1 if bias else None,
        b2 if bias else None,
        prob,
        dout,
        index,
        offsets,
        inverse,
    )


Result = dict[str, Tensor]


def partial_blocks(act: Activation = SWIGLU, **given: Any) -> Problem:
    """In bf16, with channels that are no multiple of a block, experts of which one has no row."""
    choice = random_choice(300, 2, [0, 1, 3])
    return make(act, torch.bfloat16, choice=choice, L=4, D=168, width=136, rows=620, **given)


def run(p: Problem, backend: str, **how: Any) -> Result:
    """Output and all gradients of `grouped_mlp`; see `forward`."""
    leaves = leaves_of(p)
    return gradients(forward(p, leaves, backend, **how), p.dout, leaves)


def forward(
    p: Problem,
    leaves: dict[str, Tensor],
    backend: str,
    *,
    split: bool = False,
    poison: bool = False,
    order_L: Tensor | None = None,
    inputs_persist: bool = False,
    **spec: Any,
) -> Tensor:
    """Output of `run`, computed from the leaves.

    With `split`, rows are gathered before the MLP and summed after it. `poison` is a
    split that puts NaN in dy's padding. `inputs_persist` as in `grouped_mlp`.
    """
    weights = MLPWeights(*(leaves.get(name) for name in ("w1", "w2", "b1", "b2")))
    how = MLPSpec(p.act, backend, **spec)
    plan = ExpertPlan(p.index, leaves["prob"], p.offsets, p.inverse, None, order_L)
    if not split and not poison:
        return grouped_mlp(leaves["x"], weights, plan, how, inputs_persist=inputs_persist)
    x_SD = _Gather.apply(leaves["x"], plan, backend)
    sorted_rows = plan._replace(row_index_S=None, inverse_NK=None)
    out = grouped_mlp(x_SD, weights, sorted_rows, how)
    if poison:
        row = torch.arange(len(p.index), device=p.index.device)[:, None]
        padding = row >= p.offsets[-1]
        out.register_hook(lambda dy: dy.masked_fill(padding, float("nan")))
    return Combine.apply(out, plan, backend)


def one_expert(x_ND: Tensor, weights: MLPWeights, spec: MLPSpec) -> Tensor:
    """A dense MLP of [H, D] and [D, F] as that of one expert that has all rows."""
    stacked = MLPWeights(*(None if w is None else w[None] for w in weights))
    return grouped_mlp(x_ND, stacked, one_group(x_ND), spec)


class _Gather(torch.autograd.Function):
    """Expert rows of x."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, plan: ExpertPlan, backend: str) -> Tensor:
        ctx.inverse_NK, ctx.backend = plan.inverse_NK, backend
        return gather_rows(x_ND, plan.row_index_S, plan.offsets)

    @staticmethod
    def backward(ctx: Any, dx_SD: Tensor) -> tuple[Any, ...]:
        return provider(ctx.backend).combine(dx_SD, ctx.inverse_NK), None, None


class Combine(torch.autograd.Function):
    """Sum of the expert rows of each row of x."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, plan: ExpertPlan, backend: str) -> Tensor:
        ctx.plan = plan
        return provider(backend).combine(y_SD, plan.inverse_NK)

    @staticmethod
    def backward(ctx: Any, dout_ND: Tensor) -> tuple[Any, ...]:
        return gather_rows(dout_ND, ctx.plan.row_index_S, ctx.plan.offsets), None, None


def dense(p: Problem) -> Result:
    """Reference in fp64, by a loop over rows and slots."""
    leaves = {name: t.detach().double().requires_grad_() for name, t in leaves_of(p).items()}
    experts = _expert_of_rows(p)
    out = []
    for n, slots in enumerate(p.inverse.tolist()):
        total = torch.zeros(p.x.shape[1], dtype=torch.float64)
        for s in slots:
            if s >= 0:
                e = experts[s]
                h = leaves["w1"][e] @ leaves["x"][n]
                h = h + leaves["b1"][e] if p.b1 is not None else h
                y = leaves["w2"][e] @ formula(h, p.act)
                y = y + leaves["b2"][e] if p.b2 is not None else y
                total = total + leaves["prob"][s] * y
        out.append(total + 0 * leaves["prob"].sum())  # rows without experts have gradients too: 0
    return gradients(torch.stack(out), p.dout.double(), leaves)


def composition(p: Problem) -> Result:
    """Reference by autograd over torch ops in the problem's dtype, fp32 where the MLP uses fp32."""
    leaves, dtype = leaves_of(p), p.x.dtype
    out = torch.zeros(p.x.shape, dtype=torch.float32)
    ends = p.offsets.tolist()
    for e, (begin, end) in enumerate(itertools.pairwise(ends)):
        index, prob = p.index[begin:end], leaves["prob"][begin:end, None]
        h = F.linear(leaves["x"][index], leaves["w1"][e])
        h = h + leaves["b1"][e] if p.b1 is not None else h
        a = (formula(h.float(), p.act) * prob).to(dtype)
        y = F.linear(a, leaves["w2"][e])
        y = (y + leaves["b2"][e] * prob).to(dtype) if p.b2 is not None else y
        out = out.index_add(0, index, y.float())
    return gradients(out.to(dtype), p.dout, leaves)


def formula(h: Tensor, act: Activation) -> Tensor:
    """Each activation as in its paper, one channel at a time."""
    gate, up = h.split(h.shape[-1] // 2, -1) if act.gated else (h, None)
    if act.limit:
        gate = torch.where(gate > act.limit, act.limit, gate)
        if up is not None:
            up = torch.where(up.abs() > act.limit, up.sign() * act.limit, up)
    if act.kind == "squared_relu":
        return torch.where(gate > 0, gate**2, 0.0)
    if act.kind == "geglu":
        value = gate * torch.special.ndtr(gate)
    elif act.kind in ("swiglu", "quick_geglu"):
        value = gate / (1 + torch.exp(-gate * (act.alpha if act.kind == "quick_geglu" else 1)))
    else:
        raise ValueError(f"tests/kernels/problems.py has no formula for {act.kind}: add it there")
    return value * (up + act.offset)


def error(got: Tensor, exact: Tensor) -> float:
    """Relative error in the 2-norm; the norm itself if `exact` is 0."""
    scale = exact.double().norm().item() or 1.0
    return ((got.double() - exact.double()).norm() / scale).item()


def leaves_of(p: Problem) -> dict[str, Tensor]:
    """Tensors that gradients are taken of, by name."""
    named = {"x": p.x, "w1": p.w1, "w2": p.w2, "b1": p.b1, "b2": p.b2, "prob": p.prob}
    return {k: v.detach().requires_grad_() for k, v in named.items() if v is not None}


def gradients(out: Tensor, dout: Tensor, leaves: dict[str, Tensor]) -> Result:
    """The output and a gradient per leaf, called d<name>."""
    grads = torch.autograd.grad(out, list(leaves.values()), dout, materialize_grads=True)
    return {"out": out.detach()} | {f"d{k}": g for k, g in zip(leaves, grads, strict=True)}


def _expert_of_rows(p: Problem) -> list[int]:
    counts = p.offsets.diff().tolist()
    return [e for e, count in enumerate(counts) for _ in range(count)]


def two_micro_batches(problems: Sequence[Problem], backend: str, **spec: Any) -> Result:
    """Sums of weight gradients of problems with the same weights, which a queue may pair.

    They are added to buffers of ones.
    """
    weights = [name for name in ("w1", "w2", "b1", "b2") if getattr(problems[0], name) is not None]
    shared = {name: t for name, t in leaves_of(problems[0]).items() if name in weights}
    for leaf in shared.values():
        leaf.main_grad = torch.ones(leaf.shape)  # type: ignore[attr-defined]
    with wgrad_queue.opened(Waiting(pairs=True)):
        for p in problems:
            out = forward(
                p, leaves_of(p) | shared, backend, accumulate=True, inputs_persist=True, **spec
            )
            out.backward(p.dout)
        wgrad_queue.run_all()
    return {name: leaf.main_grad for name, leaf in shared.items()}  # type: ignore[attr-defined]
