"""Program of a rank: `ExpertParallelMoE` over `symm` against the same over `alltoall`, bit for bit.

    torchrun --nproc-per-node 2 tests/parallel/expert_parallel_ranks.py
    PHALANX_ONE_GPU=1 torchrun --nproc-per-node 2 tests/parallel/expert_parallel_ranks.py

Eager and captured, two layers of one group, in bf16 and in FP8, and an overflow that is run again.
The second has all ranks on one GPU (`gpu_ranks`).
"""

import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.pop(0)  # this folder, which has a `megatron`
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phalanx.parallel.expert_parallel import ExpertParallelGroup, ExpertParallelMoE
from tests.parallel.dispatcher.gpu_ranks import join

T, E, D, WIDTH, K = 192, 8, 256, 192, 3
BF16 = torch.bfloat16


class Model:
    """Two layers over one transport, with inputs of this rank."""

    def __init__(self, transport: str, recipe: str | None, sms: int) -> None:
        self.group = ExpertParallelGroup(transport=transport, comm_sms=sms, timeout=30)
        assert self.group.transport.name == transport
        torch.manual_seed(dist.get_rank())
        sizes = (E, D, WIDTH, K)
        self.layers = [
            ExpertParallelMoE(self.group, *sizes, device="cuda", dtype=BF16, recipe=recipe)
            for _ in range(2)
        ]
        self.x = torch.randn(T, D, device="cuda", dtype=BF16, requires_grad=True)
        self.prob = torch.rand(T, K, device="cuda", requires_grad=True)
        self.idx = torch.zeros(T, K, device="cuda", dtype=torch.int64)

    def __call__(self) -> list[Tensor]:
        out = self.x
        for layer in self.layers:
            out = layer(out, self.idx, self.prob)
        leaves = [self.x, self.prob, *(p for layer in self.layers for p in layer.parameters())]
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    def take(self, turn: int) -> None:
        g = torch.Generator("cuda").manual_seed(100 * turn + dist.get_rank())
        idx = torch.rand(T, E, generator=g, device="cuda").topk(K, dim=1).indices
        with torch.no_grad():
            self.idx.copy_(idx)
            self.x.copy_(torch.randn(T, D, generator=g, device="cuda"))


def equal(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not torch.equal(a, b):
            raise SystemExit(f"rank {dist.get_rank()}: {what}: result {number} differs")
    if dist.get_rank() == 0:
        print("equal:", what, flush=True)


def check(recipe: str | None, sms: int) -> None:
    ours, theirs = Model("symm", recipe, sms), Model("alltoall", recipe, 0)
    what = f"{recipe or 'bf16'}, {sms} SMs"
    for turn in range(2):
        for model in (ours, theirs):
            model.take(turn)
        equal(ours(), theirs(), f"{what}, eager {turn}")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            ours.group.begin()
            results = ours()
    for turn in range(2, 5):
        for model in (ours, theirs):
            model.take(turn)
        wanted = theirs()
        graph.replay()
        torch.cuda.synchronize()
        equal(results, wanted, f"{what}, replay {turn}")
    assert not ours.group.overflowed()
    graph.reset()
    ours.group.release()


def overflow() -> None:
    ours, theirs = Model("symm", None, 0), Model("alltoall", None, 0)
    ours.group.budget.experts.factor = 1.0
    for model in (ours, theirs):
        model.idx.fill_(0)
    ours()
    assert ours.group.overflowed()
    ours.group.grow()
    equal(ours(), theirs(), "after an overflow")
    assert not ours.group.overflowed()
    ours.group.release()


def main() -> None:
    join()
    for recipe, sms in product((None, "fp8_block"), (0, 8)):
        check(recipe, sms)
    overflow()
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
