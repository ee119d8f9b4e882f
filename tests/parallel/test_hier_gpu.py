"""Training over pretended nodes of two GPUs, on one host, is training over one node."""

from pathlib import Path

import pytest
import torch

from tests.test_train_gpu import GRAPH, close, train

pytestmark = pytest.mark.gpu

COMMON = ("model=tiny", "parallel.expert=4", "parallel.capacity_factor=8")


@pytest.fixture(autouse=True)
def _two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper GPUs")
    monkeypatch.setenv("PHALANX_NODE_GPUS", "2")


@pytest.mark.parametrize("inside", ["symm", "keep", "beside", "torch"])
def test_hier_trains_like_collectives(inside: str, tmp_path: Path) -> None:
    """With pushes inside a node, alone or beside the experts, and with experts of torch."""
    kernels = "kernels=torch" if inside == "torch" else "kernels=fused"
    extra = {"keep": ["parallel.save_x=keep"], "beside": ["parallel.comm_sms=16"]}.get(inside, [])
    theirs = train(tmp_path, "alltoall", *COMMON, kernels, "parallel.dispatch=alltoall", ranks=4)
    ours = train(tmp_path, "hier", *COMMON, kernels, "parallel.dispatch=hier", *extra, ranks=4)
    close(ours, theirs)


def test_a_graph_trains_bit_for_bit_like_eager_steps(tmp_path: Path) -> None:
    options = [*COMMON, "kernels=fused", "parallel.dispatch=hier", "run.steps=8"]
    eager = train(tmp_path, "eager", *options, ranks=4)
    graph = train(tmp_path, "graph", *options, GRAPH, ranks=4)
    for name in ("loss", "grad_norm"):
        assert [s[name] for s in graph] == [s[name] for s in eager], name


def test_fp32_goes_by_collectives_inside_a_node(tmp_path: Path) -> None:
    """Where nothing can be pushed; what differs is the order of sums."""
    options = [*COMMON, "kernels=reference", "run.precision=fp32"]
    theirs = train(tmp_path, "alltoall", *options, "parallel.dispatch=alltoall", ranks=4)
    ours = train(tmp_path, "hier", *options, "parallel.dispatch=hier", ranks=4)
    close(ours, theirs)
