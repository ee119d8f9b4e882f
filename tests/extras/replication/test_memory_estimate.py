"""Memory of replicas and rows that come back one by one, in estimates."""

import pytest

from phalanx.moe.plan.cost.activations import Activations
from phalanx.moe.plan.cost.stages import buffer_bytes, exchange_bytes, stage_memory
from phalanx.moe.plan.cost.traffic import costs
from tests.moe.plan.cost.test_rows import (
    FFN,
    FP8,
    HIDDEN,
    LAYERS,
    RANKS,
    TOKENS,
    TOP_K,
    known,
)


@pytest.mark.parametrize("precision", [(), FP8])
def test_dispatch_holds_replicas(precision: tuple[str, ...]) -> None:
    for name in ("symm", "alltoall"):
        of = (*precision, f"parallel.dispatch={name}")
        without, replicated = known(*of), known(*of, "parallel.expert_replication=2")
        more = buffer_bytes(replicated, RANKS) - buffer_bytes(without, RANKS)
        outside = exchange_bytes(replicated, RANKS) - exchange_bytes(without, RANKS)
        assert more == outside + Activations(replicated, RANKS).replica_memory().backward > 0


def test_replicas_have_memory() -> None:
    """Weights of 2 replicas, gradients in fp32, and what is exchanged of fc1. Other kernels than
    the fused ones put own experts' fc1 beside the replicas'."""
    alltoall, slots, own = "parallel.dispatch=alltoall", 2, 32 // RANKS
    without, replicated = known(alltoall), known(alltoall, f"parallel.expert_replication={slots}")
    kept = known(alltoall, f"parallel.expert_replication={slots}", "parallel.save_x=keep")
    matrix = HIDDEN * FFN
    held = slots * 3 * matrix * (2 + 4) + 3 * RANKS * slots * 2 * matrix * 4
    (a,), (b,), (c,) = (stage_memory(cfg, RANKS) for cfg in (without, replicated, kept))
    assert 0 < b.backward - a.backward <= held and b.saved == a.saved
    assert c.saved - b.saved == LAYERS * slots * 3 * matrix * 2
    torch = known(alltoall, "kernels=torch", f"parallel.expert_replication={slots}")
    both = [Activations(cfg, RANKS).replica_memory().backward for cfg in (replicated, torch)]
    assert both == [held, held + (own + slots) * 2 * matrix * 2]


def test_replicas_over_symm_are_outside_of_what_torch_allocates() -> None:
    """Weights of 2 replicas, gradients in fp32, and a row of every slot of a rank's tokens."""
    symm, slots, matrix = "parallel.dispatch=symm", 2, HIDDEN * FFN
    without, replicated = known(symm), known(symm, f"parallel.expert_replication={slots}")
    rows = TOP_K * TOKENS * (2 * HIDDEN + 8 * TOP_K)
    more = exchange_bytes(replicated, RANKS) - exchange_bytes(without, RANKS)
    assert more == slots * 3 * matrix * (2 + 4) + rows
    assert Activations(replicated, RANKS).replica_memory().backward == 0


def test_replicas_over_nodes_are_exchanged_in_a_node() -> None:
    """Two nodes of 8: by pushes a row of every slot of a rail's tokens, by collectives the larger
    matrix of 8 ranks, not of 16."""
    slots, world, matrix = 2, 16, HIDDEN * FFN
    without, replicated = (
        known("parallel.expert=16", f"parallel.expert_replication={n}", world=world)
        for n in (0, slots)
    )
    assert (
        replicated.parallel.dispatch == "hier" and replicated.parallel.expert_replication == slots
    )
    more = exchange_bytes(replicated, world) - exchange_bytes(without, world)
    rows = 2 * TOP_K * TOKENS * (2 * HIDDEN + 8 * TOP_K)
    assert more == slots * 3 * matrix * (2 + 4) + rows
    replicated.run.device = "cpu"
    inside = Activations(replicated, world).replica_memory().backward
    assert inside == slots * 3 * matrix * (2 + 4) + 3 * 8 * slots * 2 * matrix * 4
    back = costs(replicated, world).back
    assert (back.near, back.far) == (TOP_K * 2 * 7, 1)
