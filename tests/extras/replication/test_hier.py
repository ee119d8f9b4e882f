"""Expert replication over gloo ranks that pretend to be two nodes, each of which has its own.

Everything is compared with `hier` without replication: results and gradients of tokens and
probabilities bit for bit, whatever is taken inside; those of weights with pushes inside are those
with collectives there, bit for bit.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationPlan,
    ReplicationSize,
    count_rows,
    reference_replication_plan,
)
from phalanx.extras.replication.options import ReplicationOptions
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport import choose_transport
from phalanx.parallel.dispatcher.transport_class import Dispatcher, Transport
from tests.extras.between_nodes.test_hierarchical import RANKS, SIZE
from tests.extras.replication import test_replication as flat
from tests.extras.replication.gloo_replicas import replicating
from tests.extras.replication.test_replication import EXPERTS, Made, layer
from tests.extras.replication.test_symm import CHANGES, possible, same, variant
from tests.parallel.dispatcher.gloo_exchange import gloo_exchanges
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow
from tests.support.training import pretended_nodes

pytestmark = pytest.mark.dist

COST = 10
COLLECTIVES = ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "all_gather")
KINDS = {
    "even": False,
    "one hot expert": True,
    "one expert with all": True,
    "one rank with all": False,  # which two ranks of a node share evenly
    "one rank of each node": True,
    "several hot experts": True,
}
"""Routings, and whether there must be replicas."""


def over_nodes(size: int = SIZE) -> Transport:
    with pretended_nodes(size):
        return choose_transport("hier", dist.group.WORLD, torch.bfloat16)


def dispatcher_of(
    transport: Transport,
    inside: str,
    replication: ReplicationOptions | None,
    spec: MLPSpec,
    symm: SymmOptions = SymmOptions(),  # noqa: B008  (frozen)
    fp8_rows: bool = False,
) -> Dispatcher:
    of_nodes = Transport(inside, "in this test", replication=replication)
    transport = replace(transport, inside=of_nodes)
    return flat.dispatcher_of(transport, spec, symm=symm, fp8_rows=fp8_rows)


def ways(kind: str, backend: str, slots: int, options: dict[str, Any], size: int) -> list[Made]:
    """Results without replication, with collectives inside, and with pushes in all ways."""
    p, spec, fp8_rows, how = variant(kind, backend, options)
    transport = over_nodes(size)
    made = [
        layer(p, dispatcher_of(transport, "alltoall", of, spec, fp8_rows=fp8_rows), spec, **how)
        for of in (
            None,
            ReplicationOptions(slots, COST),
            ReplicationOptions(slots, COST, keep=True),
        )
    ]
    for sms, keep in possible(spec, fp8_rows):
        replication, symm = (
            ReplicationOptions(slots, COST, keep),
            SymmOptions(keep=keep, comm_sms=sms),
        )
        with gloo_exchanges(replicating):
            pushed = dispatcher_of(transport, "symm", replication, spec, symm, fp8_rows)
            made.append(layer(p, pushed, spec, **how))
    return [on_any_node(of) for of in made]


def on_any_node(made: Made) -> Made:
    """With the replicas of all ranks' nodes, as one node may have none."""
    replicas = torch.tensor(made.replicas)
    dist.all_reduce(replicas)
    return made._replace(replicas=int(replicas))


@mostly_slow("kind", KINDS, "one rank of each node")
def test_the_bits_of_the_layer_without_replication(kind: str) -> None:
    made = run_distributed(ways, RANKS, kind, "reference", 2, {}, SIZE)
    same(made, replicas=KINDS[kind], near=1e-5 if KINDS[kind] else 0.0)


@pytest.mark.slow
def test_nodes_of_four() -> None:
    same(run_distributed(ways, 8, "several hot experts", "reference", 1, {}, 4))


def test_torch_experts() -> None:
    made = run_distributed(ways, RANKS, "one rank of each node", "torch", 1, {}, SIZE)
    same(made, near=4e-3)


@mostly_slow(
    "name",
    CHANGES,
    "rows in FP8, two micro-batches",
)
def test_variants(name: str) -> None:
    options = dict(CHANGES[name])
    near = 4e-3 if name == "gradients returned" else 1e-5
    kind = "several hot experts"
    same(run_distributed(ways, RANKS, kind, "reference", 2, options, SIZE), near=near)


def dispatcher_of_nodes() -> Dispatcher:
    spec = MLPSpec(Activation("swiglu"), "reference")
    return dispatcher_of(over_nodes(), "alltoall", ReplicationOptions(2, COST), spec)


def told(kind: str) -> list[Tensor]:
    own = flat.parts(flat.problem(kind, torch.bfloat16), dist.get_rank(), dist.get_world_size())
    received = dispatcher_of_nodes().dispatch(own.x, own.idx, own.prob)
    assert isinstance(received.statistics, ReplicationPlan)
    return list(received.statistics)


def of_node(kind: str, node: int) -> ReplicationPlan:
    """In its own numbers."""
    count = count_rows(flat.routed(kind), EXPERTS).chunk(2)[node]
    return reference_replication_plan(count, ReplicationSize(SIZE, 2, COST))


def planned(kind: str) -> ReplicationPlan:
    """Plans of both nodes, with the expert ids of the group."""
    plans = [of_node(kind, node) for node in range(2)]
    second = plans[1].expert_RN
    plans[1] = plans[1]._replace(expert_RN=torch.where(second >= 0, second + EXPERTS // 2, -1))
    want = [torch.cat(of) for of in zip(*(p[:4] for p in plans), strict=True)]
    return ReplicationPlan(*want, torch.cat([p.load_2R for p in plans], dim=1))


@pytest.mark.parametrize("kind", ["one hot expert", "one rank of each node"])
def test_every_rank_knows_the_plan_of_its_node(kind: str) -> None:
    for rank, got in enumerate(run_distributed(told, RANKS, kind)):
        for name, a, b in zip(
            ReplicationPlan._fields, got, of_node(kind, rank // SIZE), strict=True
        ):
            assert torch.equal(a, b), name
            assert a.dtype == torch.int32


def over_the_rail(inside: str, replication: ReplicationOptions | None) -> list[tuple[str, int]]:
    """Collectives between nodes in two micro-batches of a layer, and the numbers that each gets."""
    asked, transport = list[tuple[str, int]](), over_nodes()
    spec, p = (
        MLPSpec(Activation("swiglu"), "reference"),
        flat.problem("one hot expert", torch.bfloat16),
    )
    assert transport.nodes is not None
    rail = transport.nodes.rail

    def noted(name: str) -> Any:
        collective = getattr(dist, name)

        def called(*given: Any, **how: Any) -> Any:
            if rail in (*given, *how.values()):
                asked.append((name, given[0].numel()))
            return collective(*given, **how)

        return mock.patch.object(dist, name, called)

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(noted(name))
        stack.enter_context(gloo_exchanges(replicating))
        layer(p, dispatcher_of(transport, inside, replication, spec), spec)
    return asked


def both_over_the_rail(inside: str) -> list[list[tuple[str, int]]]:
    return [over_the_rail(inside, of) for of in (None, ReplicationOptions(2, COST))]


@pytest.mark.parametrize("inside", ["alltoall", "symm"])
def test_replicas_say_nothing_between_nodes(inside: str) -> None:
    """Calls of a layer send nothing about replicas; loads are reduced once a step."""
    for without, replicas in run_distributed(both_over_the_rail, RANKS, inside):
        # Routing, tokens and sums; gradients of sums, tokens and probabilities.
        assert len(without) == 2 * 6
        assert replicas == without


def gradients(kind: str) -> list[Tensor]:
    return flat.gradients(flat.problem(kind, torch.bfloat16), dispatcher_of_nodes())


@mostly_slow("kind", ["one expert with all", "several hot experts"], "several hot experts")
def test_rows_of_an_expert_are_parted_in_the_order_of_ranks(kind: str) -> None:
    """FP8 blocks are those without replication, though rows arrive in another order.

    Gradients are the predicted sums, bit for bit.
    """
    grads = run_distributed(gradients, RANKS, kind)
    flat.as_planned(flat.problem(kind, torch.bfloat16), planned(kind), grads)
