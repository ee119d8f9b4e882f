"""Places of pairs by kernels, against the definition."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationPlan,
    ReplicationSize,
    assign_pairs,
    count_rows,
    reference_replication_plan,
    route_to_replicas,
)
from tests.extras.replication.kernels.test_replication_plan import DEVICES, routing
from tests.kernels.interpreter import interpret

CASES = [
    (routing(96, 3, 8, 1), 8, ReplicationSize(2, 1, 4, 1)),
    (routing(3000, 2, 12, 2), 12, ReplicationSize(4, 2, 4, 16)),  # several chunks
    (routing(2048, 4, 24, 3, 2.0), 24, ReplicationSize(8, 3, 0, 128)),
    (routing(700, 3, 8, 4), 8, ReplicationSize(4, 0, 4)),  # no slots
    (torch.full((10, 2), -1, dtype=torch.int32), 4, ReplicationSize(2, 2, 0, 1)),
    (torch.zeros(5000, 1, dtype=torch.int32), 4, ReplicationSize(4, 1, 1)),  # one expert with all
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_plan_and_the_places(case: int, device: str) -> None:
    idx, experts, size = CASES[case]
    plan, slots = route_to_replicas(idx.to(device), experts, size)
    want = reference_replication_plan(count_rows(idx, experts), size)
    for name, a, b in zip(ReplicationPlan._fields, plan, want, strict=True):
        assert torch.equal(a.cpu(), b), name
    assert torch.equal(slots.cpu(), assign_pairs(idx, want))


def interpreted() -> None:
    from phalanx.extras.replication.kernels import replication_plan_triton as kernels

    for idx, experts, size in CASES:
        counts = kernels.count_chunks(idx, experts)
        count = counts.sum(0, dtype=torch.int32)
        assert torch.equal(count, count_rows(idx, experts))
        plan = reference_replication_plan(count, size)
        slots = kernels.assign_pairs(idx, counts, plan)
        assert torch.equal(slots, assign_pairs(idx, plan))


def test_the_kernels_by_an_interpreter() -> None:
    interpret(__name__)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "ranks"), [(65536, 8, 256, 8), (1536, 2, 8, 2)]
)
def test_the_kernels_compile_for_hopper(
    tokens: int, top_k: int, experts: int, ranks: int, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from phalanx.extras.replication.kernels import replication_plan_triton as kernels
    from tests.kernels.triton_code import launched

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    idx, slots = empty(tokens, top_k), empty(ranks, 2)
    plan = ReplicationPlan(slots, slots, slots, empty(experts), empty(2, ranks))
    chunks = -(-idx.numel() // kernels._CHUNK)
    for name, call in (
        ("count_chunks_kernel", lambda: kernels.count_chunks(idx, experts)),
        ("assign_pairs_kernel", lambda: kernels.assign_pairs(idx, empty(chunks, experts), plan)),
    ):
        assert launched(kernels, name, call, tmp_path).stack == 0, f"{name} spills"


@pytest.mark.gpu
def test_the_kernels_in_a_graph() -> None:
    from tests.kernels.capture import check_replay

    idx, other = routing(3000, 4, 16, 1).cuda(), routing(3000, 4, 16, 2).cuda()

    def call() -> list[Tensor]:
        plan, slots = route_to_replicas(idx, 16, ReplicationSize(4, 2, 10))
        return [*plan, slots]

    check_replay(call, idx, other)
