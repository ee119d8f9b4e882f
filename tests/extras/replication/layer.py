"""Program of a rank: layers over `symm` with expert replication, against the same without.

    torchrun --nproc-per-node R tests/extras/replication/layer.py
    PHALANX_ONE_GPU=1 torchrun --nproc-per-node R .../replication/layer.py small8
    PHALANX_NODE_GPUS=2 torchrun --nproc-per-node 4 .../replication/layer.py hier

The last one has `symm` inside the nodes of `hier`, each of which replicates by itself.
Results and gradients of tokens, probabilities and residual have the same bits; gradients of weights
and biases, in fp32, are sums of the same products in another order. With and without pushes beside
the experts, tokens and weights of replicas kept or sent again, in bf16, in FP8, and in FP8 with
rows that travel so (`fp8rows`), eager and captured, with routing that changes under the graph;
prints what was compared, raises at the first difference. Names of shapes with SMs, and of
precisions, restrict it to these; with PHALANX_ONE_GPU all ranks share a GPU (`gpu_ranks`).
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from phalanx.extras.replication.options import ReplicationOptions
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.parallel import runtime
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport import choose_transport
from phalanx.parallel.dispatcher.transport_class import Transport
from tests.parallel.dispatcher.gpu_ranks import join, on_one_gpu
from tests.parallel.dispatcher.symm_layer import (
    SPECS,
    Layer,
    Way,
    captured,
    chosen,
    compare,
    routed,
)

SHAPES = {
    "small": (768, 128, 128, 8, 2),
    "wide": (1024, 2880, 960, 32, 4),
    "many": (2048, 2048, 768, 64, 8),
}
"""Tokens of a rank, hidden, width, experts, top-k; `wide` has biases."""
KINDS = {"random": False, "one rank": True, "one expert": True, "none here": False}
"""Routings, and whether there must be replicas."""
PRECISIONS = {
    **{name: (spec, False) for name, spec in SPECS.items()},
    "fp8rows": (SPECS["fp8"], True),
}
"""How experts compute, and whether rows travel in FP8."""
SLOTS, COST = 2, 8
NEAR = 1e-5
"""Tolerance of an expert's gradient in its norm: fp32 sums of equal products in another order."""


def routing(kind: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """int32 [T, K]; with "one expert" half of the tokens take the second expert of all."""
    tokens, *_, experts, top_k = shape
    idx = routed(kind, tokens, experts, top_k, g)
    if kind == "one expert":
        takes = torch.rand(tokens, generator=g, device="cuda") < 0.5
        takes &= (idx != 1).all(1)
        idx[:, 0] = torch.where(takes, 1, idx[:, 0])
    return idx


def near(ours: Tensor, plain: Tensor, what: str) -> None:
    """Gradients of each expert differ by the order of sums alone."""
    a, b = (t.flatten(1).double() for t in (ours, plain))
    far = (a - b).norm(dim=1) > NEAR * b.norm(dim=1)
    if far.any():
        raise SystemExit(f"rank {dist.get_rank()}: {what}: gradients of {int(far.sum())} experts")


def of_all_ranks(replicas: Tensor) -> int:
    """The most that a rank knows of, as nodes of `hier` have plans of their own."""
    dist.all_reduce(replicas, op=dist.ReduceOp.MAX)
    return int(replicas)


def replicating(plain: Transport, keep: bool) -> Transport:
    """The transport with replication, inside nodes if it goes over several."""
    if plain.inside is not None:
        assert plain.inside.name == "symm"
        return replace(plain, inside=replicating(plain.inside, keep))
    return replace(plain, replication=ReplicationOptions(SLOTS, COST, keep))


def check(
    plain: Way,
    label: str,
    shape: tuple[int, ...],
    kind: str,
    symm: SymmOptions,
    spec: MLPSpec,
) -> None:
    replicated = plain._replace(transport=replicating(plain.transport, symm.keep))
    bias = label.startswith("wide")
    ours, theirs = (Layer(way, shape, shape[4], symm, spec, bias) for way in (replicated, plain))
    own = len(ours.own)
    g = torch.Generator("cuda").manual_seed(100 + dist.get_rank())

    def same(got: list[Tensor], wanted: list[Tensor], what: str) -> None:
        bits = [t[:3] + t[3 + own :] for t in (got, wanted)]
        compare(*bits, what)
        for name, a, b in zip(("w1", "w2", "b1", "b2"), got[3:], wanted[3 : 3 + own], strict=False):
            near(a, b, f"{what}: {name}")

    for shared, residual in ((False, False), (True, True)):
        what = f"{label}, {kind}, keep {symm.keep}, {symm.comm_sms} SMs, shared {shared}"
        graph = None
        for turn in range(5):
            idx = routing(kind, shape, g)
            x = torch.randn(ours.x.shape, generator=g, device="cuda").bfloat16()
            with torch.no_grad():
                for layer in (ours, theirs):
                    layer.idx.copy_(idx)
                    layer.x.copy_(x)
            wanted = theirs(shared, residual)
            same(ours(shared, residual), wanted, f"{what}, turn {turn}")
            found = of_all_ranks((ours.statistics.expert_RN >= 0).sum())
            if KINDS[kind] and not found:
                raise SystemExit(f"{what}: no expert was replicated")
            if turn == 1:
                graph = captured(lambda s=shared, r=residual: ours(s, r), ours.connections)
            if graph is not None:
                same(graph(), wanted, f"{what}, replay {turn}")
        del graph
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(f"equal: {what}, {found} replicas", flush=True)


def main() -> None:
    if "hier" in sys.argv and on_one_gpu():
        raise SystemExit("hier captures collectives, which gloo cannot: unset PHALANX_ONE_GPU")
    here = join()
    only = {*sys.argv[1:]} - {"hier"}
    name = "hier" if "hier" in sys.argv else "symm"
    plain = choose_transport(name, dist.group.WORLD, torch.bfloat16)
    for label, precision, keep, sms in product(SHAPES, PRECISIONS, (False, True), (0, 8)):
        if not chosen(only, f"{label}{sms}", precision, PRECISIONS):
            continue
        symm = SymmOptions(keep=keep, comm_sms=sms, timeout=20)
        spec, fp8_rows = PRECISIONS[precision]
        spec = replace(spec, accumulate=True)
        for kind in KINDS:
            way = Way(plain, fp8_rows, here.connections)
            check(way, f"{label} in {precision}", SHAPES[label], kind, symm, spec)
    torch.cuda.synchronize()
    dist.barrier()
    runtime.stop(here)


if __name__ == "__main__":
    main()
