"""Training over pretended nodes of two GPUs, on one host, is training over one node."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.end_to_end.test_train_gpu import GRAPH, Steps, close, train
from tests.parallel.dispatcher.test_symm_gpu import REPLICATED, compare

pytestmark = pytest.mark.gpu

COMMON = ("model=tiny", "parallel.expert=4", "parallel.capacity_factor=8")
FUSED, REFERENCE = "kernels=fused", "parallel.dispatch=alltoall"


@pytest.fixture(autouse=True, scope="module")
def _two_nodes() -> Iterator[None]:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper GPUs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_NODE_GPUS", "2")
        yield


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Results by collectives, the reference of pushes inside a node."""
    return train(tmp_path_factory.mktemp("fused"), "alltoall", *COMMON, FUSED, REFERENCE, ranks=4)


@pytest.mark.parametrize("inside", ["symm", "keep", "beside"])
def test_hier_trains_like_collectives(inside: str, fused: Steps, tmp_path: Path) -> None:
    """With pushes inside a node, alone or beside the experts."""
    extra = {"keep": ["parallel.save_x=keep"], "beside": ["parallel.comm_sms=16"]}.get(inside, [])
    close(train(tmp_path, "hier", *COMMON, FUSED, "parallel.dispatch=hier", *extra, ranks=4), fused)


def test_hier_trains_like_collectives_with_experts_of_torch(tmp_path: Path) -> None:
    theirs = train(tmp_path, "alltoall", *COMMON, "kernels=torch", REFERENCE, ranks=4)
    options = [*COMMON, "kernels=torch", "parallel.dispatch=hier"]
    close(train(tmp_path, "hier", *options, ranks=4), theirs)


@pytest.mark.parametrize("slots", [0, 2])
def test_a_graph_trains_bit_for_bit_like_eager_steps(slots: int, tmp_path: Path) -> None:
    """Logged loads are the same too, which the nodes reduce once a step."""
    options = [
        *COMMON,
        FUSED,
        "parallel.dispatch=hier",
        "run.steps=8",
        f"parallel.expert_replication={slots}",
    ]
    eager = train(tmp_path, "eager", *options, ranks=4)
    graph = train(tmp_path, "graph", *options, GRAPH, ranks=4)
    of_replicas = (
        ("rank_load", "replicas", "rank_load_without_replicas", "rank_load_with_replicas")
        if slots
        else ()
    )
    for name in ("loss", "grad_norm", *of_replicas):
        assert [s[name] for s in graph] == [s[name] for s in eager], name


def test_rows_in_fp8_change_no_loss(tmp_path: Path) -> None:
    """Experts would round tokens and gradients that arrive in bf16 alike; captured too."""
    options = [*COMMON, FUSED, "parallel.dispatch=hier", "run.steps=8", "precision=fp8_block"]
    rows = "precision.dispatch=fp8"
    ways = {"bf16": [], "fp8": [rows], "graph": [rows, GRAPH]}
    trained = {name: train(tmp_path, name, *options, *way, ranks=4) for name, way in ways.items()}
    for name, steps in trained.items():
        for metric in ("loss", "grad_norm"):
            assert [s[metric] for s in steps] == [s[metric] for s in trained["bf16"]], name


def test_fp32_goes_by_collectives_inside_a_node(tmp_path: Path) -> None:
    """Without pushes; only the order of sums differs."""
    options = [*COMMON, "kernels=reference", "precision=fp32"]
    theirs = train(tmp_path, "alltoall", *options, REFERENCE, ranks=4)
    ours = train(tmp_path, "hier", *options, "parallel.dispatch=hier", ranks=4)
    close(ours, theirs)


def test_layers_equal_those_with_collectives_inside_a_node_bit_for_bit() -> None:
    """In bf16, and in FP8, where the others' rows travel in bf16."""
    compare(4, "hier", timeout=600)


def test_layers_with_replication_in_each_node_equal_those_without() -> None:
    compare(4, "hier", program=REPLICATED, least=288, timeout=900)
