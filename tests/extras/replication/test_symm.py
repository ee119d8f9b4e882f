"""Expert replication over the exchanges of `symm`, by gloo: against `alltoall` without replication.

Results and gradients of tokens and probabilities must have the same bits, whatever overlaps and
whatever is kept; those of weights are what `alltoall` with replication makes, bit for bit.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.extras.replication.options import ReplicationOptions
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.quantize import row_bytes
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport_class import Dispatcher, Transport
from tests.extras.replication import test_replication as flat
from tests.extras.replication.gloo_replicas import replicating
from tests.extras.replication.test_replication import (
    HIDDEN,
    KINDS,
    Made,
    Problem,
    check,
    layer,
)
from tests.parallel.dispatcher.gloo_exchange import experts, gloo_exchanges
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
    transport = Transport(name, "wanted", replication=replication)
    symm = SymmOptions(keep=keep, comm_sms=sms)
    return flat.dispatcher_of(transport, spec, symm=symm, fp8_rows=fp8_rows)


def variant(
    kind: str, backend: str, options: dict[str, Any]
) -> tuple[Problem, MLPSpec, bool, dict[str, bool]]:
    """Problem and spec of options, whether rows travel in FP8, and arguments of `layer`."""
    p = flat.problem(kind, torch.bfloat16, options.pop("bias", False))
    how = {name: options.pop(name) for name in ("crossed", "shared") if name in options}
    fp8_rows = options.pop("fp8_rows", False)
    return (
        p,
        MLPSpec(Activation("swiglu"), backend, **{"accumulate": True, **options}),
        fp8_rows,
        how,
    )


def possible(spec: MLPSpec, fp8_rows: bool) -> list[tuple[int, bool]]:
    """`WAYS` without overlap of what becomes FP8 where it arrives, as it has to be there."""
    return [way for way in WAYS if not way[0] or spec.recipe is None or fp8_rows]


def ways(kind: str, backend: str, slots: int, options: dict[str, Any]) -> list[Made]:
    """Without replication and with them over collectives, and with them over pushes in all ways."""
    p, spec, fp8_rows, how = variant(kind, backend, options)
    replication = ReplicationOptions(slots, cost=10)
    made = [
        layer(p, dispatcher_of("alltoall", of, 0, False, spec, fp8_rows), spec, **how)
        for of in (None, replication)
    ]
    for sms, keep in possible(spec, fp8_rows):
        with gloo_exchanges(replicating) as exchanges:
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
        with gloo_exchanges(replicating):
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
