"""Expert replication over the exchanges of `symm`, by gloo: against `alltoall` without replication.

Results and gradients of tokens and probabilities must have the same bits, whatever overlaps and
whatever is kept; those of weights are what `alltoall` with replication makes, bit for bit.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.autograd import ExpertMLP, ExpertMLPArgs, OwnExperts
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.packed import row_bytes
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.replication.experts import ReplicatedExperts
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.base import TokenChoices, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.received import Received
from phalanx.parallel.dispatcher.replication.options import ReplicationOptions
from phalanx.parallel.dispatcher.transport_class import Dispatcher, Transport
from tests.parallel.dispatcher.gloo_exchange import gloo_exchanges
from tests.parallel.dispatcher.replication import test_replication as flat
from tests.parallel.dispatcher.replication.test_replication import (
    EXPERTS,
    HIDDEN,
    KINDS,
    TOP_K,
    Made,
    Problem,
    check,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow

pytestmark = pytest.mark.dist

WAYS = [(0, False), (0, True), (8, False), (8, True)]
"""SMs that push beside the experts, and whether tokens and weights of replicas are kept."""


def dispatcher_of(
    name: str,
    replication: ReplicationOptions | None,
    sms: int,
    keep: bool,
    spec: Any,
    fp8_rows: bool = False,
) -> Dispatcher:
    return make_dispatcher(
        Transport(name, "wanted", replication=replication),
        group=dist.group.WORLD,
        experts=EXPERTS,
        slots=TokenChoices(TOP_K, TOP_K),
        budget=Budget(float(EXPERTS), torch.device("cpu")),
        backend=spec.backend,
        symm=SymmOptions(keep=keep, comm_sms=sms),
        recipe=spec.recipe,
        fp8_rows=fp8_rows,
        connections=Connections(),
    )


def experts(received: Received, weights: MLPWeights, spec: MLPSpec) -> Tensor:
    """`grouped_mlp`, which refuses overlap on a CPU."""
    plan, overlap, exchange = received.plan, received.overlap, received.replicas
    here = OwnExperts() if exchange is None else ReplicatedExperts(exchange)
    how = ExpertMLPArgs(spec, torch.is_grad_enabled(), overlap, received.fp8_inputs, experts=here)
    prob_S = plan.row_prob_S if overlap is None else None
    with received.saving():
        return ExpertMLP.apply(received.rows_ND, *weights, prob_S, plan, how)


def layer(
    p: Problem,
    dispatcher: Dispatcher,
    spec: MLPSpec,
    *,
    crossed: bool = False,
    shared: bool = False,
) -> Made:
    """Results of two micro-batches of the same tokens, the second in the opposite order.

    With `crossed` both go forward before the first goes backward.
    """
    own = flat.parts(p, dist.get_rank(), dist.get_world_size())
    weights = MLPWeights(*(None if w is None else w.requires_grad_() for w in own.weights))
    for w in weights:
        if w is not None and spec.accumulate:
            w.main_grad = torch.full_like(w, 0.125, dtype=torch.float32)
    found, waiting = [], []

    def back(out: Tensor, x: Tensor, prob: Tensor, dout: Tensor, replicas: int) -> None:
        out.backward(dout)
        found.append((out.detach(), x.grad, prob.grad, replicas))

    for turn in (slice(None), torch.arange(len(own.x) - 1, -1, -1)):
        x, prob = own.x[turn].requires_grad_(), own.prob[turn].requires_grad_()
        received = dispatcher.dispatch(x, own.idx[turn], prob)
        out = experts(received, weights, spec)
        sums = dispatcher.send_sums(out, received, alone=not shared)
        addends = [x * 0.5] * shared + [own.x[turn]]
        out = dispatcher.receive_sums(sums, received, addends)
        replicas = (
            0
            if received.replication_plan is None
            else int((received.replication_plan.expert_RN >= 0).sum())
        )
        waiting.append((out, x, prob, own.dout[turn], replicas))
        if not crossed:
            back(*waiting.pop())
    for given in waiting:
        back(*given)
    of = [w for w in weights if w is not None]
    grads = [w.main_grad if spec.accumulate else w.grad for w in of]
    out, dx, dprob, replicas = zip(*found, strict=True)
    return Made(torch.cat(out), torch.cat(dx), torch.cat(dprob), grads, min(replicas))


def ways(kind: str, backend: str, slots: int, options: dict[str, Any]) -> list[Made]:
    """Without replication and with them over collectives, and with them over pushes in all ways."""
    p = flat.problem(kind, torch.bfloat16, options.pop("bias", False))
    how = {name: options.pop(name) for name in ("crossed", "shared") if name in options}
    fp8_rows = options.pop("fp8_rows", False)
    options.setdefault("accumulate", True)
    spec = MLPSpec(Activation("swiglu"), backend, **options)
    replication = ReplicationOptions(slots, cost=10)
    made = [
        layer(p, dispatcher_of("alltoall", of, 0, False, spec, fp8_rows), spec, **how)
        for of in (None, replication)
    ]
    for sms, keep in WAYS:
        if sms and spec.recipe is not None and not fp8_rows:
            continue  # what becomes FP8 where it arrives has to be there
        with gloo_exchanges() as exchanges:
            of = ReplicationOptions(slots, cost=10, keep=keep)
            pushed = dispatcher_of("symm", of, sms, keep, spec, fp8_rows)
            made.append(layer(p, pushed, spec, **how))
        if fp8_rows:
            sent_in_fp8(exchanges[0].sent, again=sms > 0 and not keep)
    return made


def sent_in_fp8(sent: list[int], again: bool) -> None:
    """FP8 rows of two micro-batches: tokens and gradients of sums, and resent tokens."""
    small, whole = row_bytes(HIDDEN), 2 * HIDDEN
    assert sorted(sent) == sorted(2 * [small, whole, small, *again * [small], whole])


def same(by_rank: list[list[Made]], *, replicas: bool = True, near: float = 1e-5) -> None:
    for plain, flat_replicas, *pushed in by_rank:
        for got in pushed:
            check([(got, plain)], replicas=replicas, near=near)
            for a, b in zip(got.grads, flat_replicas.grads, strict=True):
                assert torch.equal(a, b)


@mostly_slow("ranks", [2, 4], 4)
@mostly_slow("kind", KINDS, "one rank with all")
def test_the_bits_of_the_layer_without_replication(kind: str, ranks: int) -> None:
    same(run_distributed(ways, ranks, kind, "reference", 2, {}))


def test_torch_experts() -> None:
    same(run_distributed(ways, 2, "several hot experts", "torch", 2, {}), near=4e-3)


@mostly_slow("ranks", [2, 4], 4)
def test_even_routing_replicates_nothing(ranks: int) -> None:
    same(run_distributed(ways, ranks, "even", "reference", 2, {}), replicas=False, near=0.0)


CHANGES: dict[str, dict[str, Any]] = {
    "biases, a shared expert, h again": {"bias": True, "shared": True, "recompute_h": True},
    "gradients returned": {"accumulate": False},
    "two micro-batches under way": {"crossed": True},
    "rows that become FP8 where they arrive": {"recipe": Fp8Block()},
    "rows in FP8, two micro-batches": {"recipe": Fp8Block(), "fp8_rows": True, "crossed": True},
    "rows in FP8, biases, h again": {
        "recipe": Fp8Block(grad_format="e5m2"),
        "fp8_rows": True,
        "bias": True,
        "recompute_h": True,
    },
    "rows in FP8, other switches": {
        "recipe": Fp8Block(hidden="fp8", wgrad="bf16"),
        "fp8_rows": True,
        "shared": True,
    },
}


@mostly_slow(
    "name",
    CHANGES,
    *("biases, a shared expert, h again", "gradients returned"),
    *("rows that become FP8 where they arrive", "rows in FP8, biases, h again"),
)
def test_variants(name: str) -> None:
    options = dict(CHANGES[name])
    near = 4e-3 if name == "gradients returned" else 1e-5
    same(run_distributed(ways, 2, "several hot experts", "reference", 2, options), near=near)


@mostly_slow("kind", [*KINDS, "even"])
def test_rows_in_fp8(kind: str) -> None:
    options = {"recipe": Fp8Block(), "fp8_rows": True}
    made = run_distributed(ways, 4, kind, "reference", 2, options)
    same(made, replicas=kind != "even", near=1e-5 if kind != "even" else 0.0)


@mostly_slow("slots", [1, 3], 3)
def test_slots(slots: int) -> None:
    same(run_distributed(ways, 4, "several hot experts", "reference", slots, {}))


def forward_only() -> None:
    p = flat.problem("one hot expert", torch.bfloat16)
    spec = MLPSpec(Activation("swiglu"), "reference")
    own = flat.parts(p, dist.get_rank(), dist.get_world_size())
    weights = MLPWeights(*(w.requires_grad_() for w in own.weights[:2]))
    x = own.x.requires_grad_()
    for sms, keep in WAYS:
        with gloo_exchanges():
            dispatcher = dispatcher_of("symm", ReplicationOptions(2, 10, keep), sms, keep, spec)
            received = dispatcher.dispatch(x, own.idx, own.prob)
            out = dispatcher.combine(experts(received, weights, spec), received)
            with torch.no_grad():
                received = dispatcher.dispatch(x, own.idx, own.prob)
                again = dispatcher.combine(experts(received, weights, spec), received)
            assert torch.equal(out, again)
            out.backward(own.dout)  # after an evaluation that has used all memory again


def test_evaluation_gives_the_same() -> None:
    run_distributed(forward_only, 2)
