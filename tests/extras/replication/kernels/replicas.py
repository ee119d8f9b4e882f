"""Guests without a transport: whose weights are here, and what becomes of a layer with them.

`compare` runs a layer whose last experts are replicas, and the same layer with all experts its own:
rows, their gradients and every expert's gradients must have the same bits.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.extras.replication.kernels.experts import ReplicatedExperts
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import LAYERS, Layer, MLPSpec, MLPWeights, layer_pair
from tests.kernels.problems import Problem, Result, leaves_of

NAMES = ("w1", "w2", "b1", "b2")
BEFORE = 0.125
"""In the gradients' buffers at first."""


class Copied:
    """`ReplicaExchange` in one process; memory read too early or kept too long is NaN."""

    def __init__(
        self,
        theirs: MLPWeights,
        *,
        keep: bool = False,
        log: list | None = None,
        words: Tensor | None = None,
    ) -> None:
        self._theirs, self.keep, self._words = theirs, keep, words
        self.log: list = [] if log is None else log
        """Names of calls."""
        self.given: list[Tensor | None] = []
        """Gradients as they were when they left."""

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        self.log.append(f"send_weights {first}")
        self._first = first
        self._here = _each(self._theirs, lambda w: torch.full_like(w, torch.nan))
        return self._here

    def ready(self, layer: Layer) -> Tensor | None:
        if layer != self._first or self._words is None:
            return None
        self._come(layer)
        return self._words

    def wait(self, layer: Layer) -> None:
        self.log.append(f"wait {layer}")
        self._come(layer)

    def _come(self, layer: Layer) -> None:
        for to, w in zip(
            layer_pair(self._here, layer), layer_pair(self._theirs, layer), strict=True
        ):
            if w is not None:
                to.copy_(w)

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        self.log.append("grad_buffer")
        like = dict(dtype=torch.float32)
        self._grads = _each(self._theirs, lambda w: torch.full_like(w, torch.nan, **like))
        self.given = [None] * len(NAMES)
        return self._grads

    def send_grads(self, layer: Layer) -> None:
        self.log.append(f"send_grads {layer}")
        made = [None if g is None else g.clone() for g in layer_pair(self._grads, layer)]
        self.given[LAYERS.index(layer) :: 2] = made

    def reduce_grads(self, layer: Layer, own: list[Tensor | None]) -> None:
        self.log.append(f"reduce_grads {layer}")
        for grad in own:
            if grad is not None:
                grad.add_(1)


def _each(weights: MLPWeights, fn: Any) -> MLPWeights:
    return MLPWeights(*(None if w is None else fn(w.detach()) for w in weights))


def experts_of(p: Problem, experts: slice) -> MLPWeights:
    """Weights of some of a problem's experts."""
    given = [getattr(p, name) for name in NAMES]
    return MLPWeights(*(None if w is None else w[experts].clone() for w in given))


def with_replicas(
    p: Problem,
    own: int,
    spec: MLPSpec,
    *,
    replicas: Copied,
    order: Tensor | None = None,
    main_grad: torch.dtype = torch.float32,
    frozen: tuple[str, ...] = (),
    overlap: Any = None,
) -> Result:
    """Out and gradients, those of own weights by name and those of replicas' as `theirs`."""
    mine = replace(p, **experts_of(p, slice(own))._asdict())
    leaves, weights = _leaves(mine, spec, main_grad, frozen)
    plan = ExpertPlan(p.index, leaves["prob"], p.offsets, p.inverse, None, order)
    experts = ReplicatedExperts(replicas)
    out = grouped_mlp(leaves["x"], weights, plan, spec, experts=experts, overlap=overlap)
    out.backward(p.dout)
    made = _found(out, leaves, spec)
    empty = p.offsets.diff()[own:] == 0  # nobody reads what is there
    given = dict(zip(NAMES, replicas.given, strict=True)) if replicas.given else {}
    for name, grad in given.items():
        if grad is not None and name not in frozen:
            grad[empty] = 0
            made[f"theirs {name}"] = grad
    return made


def without(
    p: Problem,
    own: int,
    spec: MLPSpec,
    *,
    order: Tensor | None = None,
    main_grad: torch.dtype = torch.float32,
    frozen: tuple[str, ...] = (),
) -> Result:
    """The same with all experts a rank's own; gradients are taken apart, and added to as `Copied`
    does."""
    leaves, weights = _leaves(p, spec, main_grad, frozen)
    plan = ExpertPlan(p.index, leaves["prob"], p.offsets, p.inverse, None, order)
    out = grouped_mlp(leaves["x"], weights, plan, spec)
    out.backward(p.dout)
    made = _found(out, leaves, spec)
    for name in NAMES:
        if name in made:
            grad = made[name]
            made |= {name: grad[:own] + 1, f"theirs {name}": grad[own:]}
    return made


def compare(
    p: Problem, own: int, spec: MLPSpec, *, keep: bool = False, **given: Any
) -> tuple[Result, list]:
    """Both, in fp32 buffers: they must be equal. Returns the first, and the log of its replicas."""
    replicas = Copied(experts_of(p, slice(own, None)), keep=keep)
    got, want = (
        with_replicas(p, own, spec, replicas=replicas, **given),
        without(p, own, spec, **given),
    )
    same(got, want)
    return got, replicas.log


def same(got: Result, want: Result, before: float = BEFORE) -> None:
    """Every bit; what was in buffers `before` was not where replicas' gradients are."""
    assert got.keys() == want.keys()
    for name in want:
        a = got[name] + before if name.startswith("theirs") else got[name]
        assert torch.equal(a, want[name]), name


def _leaves(
    p: Problem, spec: MLPSpec, main_grad: torch.dtype, frozen: tuple[str, ...]
) -> tuple[dict[str, Tensor], MLPWeights]:
    leaves = leaves_of(p)
    for name in NAMES:
        if name in leaves and spec.accumulate:
            leaves[name].main_grad = torch.full_like(leaves[name], BEFORE, dtype=main_grad)
        if name in frozen:
            leaves[name].requires_grad_(False)
    return leaves, MLPWeights(*(leaves.get(name) for name in NAMES))


def _found(out: Tensor, leaves: dict[str, Tensor], spec: MLPSpec) -> Result:
    made = {"out": out.detach(), "dx": leaves["x"].grad, "dprob": leaves["prob"].grad}
    for name in NAMES:
        if name in leaves and leaves[name].requires_grad:
            made[name] = leaves[name].main_grad if spec.accumulate else leaves[name].grad
    return made
