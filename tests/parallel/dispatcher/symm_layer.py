"""Program of a rank: layers over `symm` against the same over `alltoall`, bit for bit.

    torchrun --nproc-per-node R tests/parallel/dispatcher/symm_layer.py
    PHALANX_NODE_GPUS=2 torchrun --nproc-per-node 4 tests/parallel/dispatcher/symm_layer.py hier
    PHALANX_ONE_GPU=1 torchrun --nproc-per-node R tests/parallel/dispatcher/symm_layer.py small8

The second compares them as the transports inside the nodes of `hier`, and rows that travel in FP8
with rows that the experts make FP8. The third has all ranks on one GPU (`gpu_ranks`). With and
without pushes beside the experts, tokens kept or sent again, in bf16 and in FP8, eager and
captured; prints what was compared, raises at the first difference. Names of shapes with SMs, and of
precisions, restrict it to these.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel import runtime
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.base import TokenChoices, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport import choose_transport
from phalanx.parallel.dispatcher.transport_class import Transport
from tests.parallel.dispatcher.gpu_ranks import join, on_one_gpu

SHAPES = {"small": (96, 128, 128, 8, 2), "wide": (1024, 2880, 960, 32, 4)}
"""Tokens of a rank, hidden, width, experts, top-k."""
KINDS = ("random", "one rank", "none here", "all experts")
SPECS = {
    "bf16": MLPSpec(Activation("swiglu"), "fused"),
    "fp8": MLPSpec(Activation("swiglu"), "fused", recipe=Fp8Block()),
}


def routed(kind: str, tokens: int, experts: int, top_k: int, g: torch.Generator) -> Tensor:
    scores = torch.rand(tokens, experts, generator=g, device="cuda")
    if kind == "one rank":
        scores[:, : max(top_k, experts // dist.get_world_size())] += 1
    idx = scores.topk(top_k, dim=1).indices.int()
    if kind == "none here" and dist.get_rank() == 0:
        idx.fill_(-1)
    return idx


class Way(NamedTuple):
    """How rows travel."""

    transport: Transport
    fp8_rows: bool
    """In FP8, if the experts are."""
    connections: Connections
    """Memory of its exchanges."""


def ways(hier: bool, connections: Connections) -> tuple[Way, Way]:
    """A tested layer, and its reference."""
    ours, flat = (
        choose_transport(name, dist.group.WORLD, torch.bfloat16)
        for name in ("hier" if hier else "symm", "alltoall")
    )
    if not hier:
        return Way(ours, True, connections), Way(flat, True, connections)
    assert ours.inside is not None and ours.inside.name == "symm"
    inside = replace(ours, inside=flat)
    return Way(ours, True, connections), Way(inside, False, connections)


class Layer:
    """One transport with weights and inputs of its own shape."""

    def __init__(
        self,
        way: Way,
        shape: tuple[int, ...],
        top_k: int,
        symm: SymmOptions,
        spec: MLPSpec,
        bias: bool = False,
        budget: Budget | None = None,
    ) -> None:
        T, D, F, E, _ = shape
        self.spec, self.connections = spec, way.connections
        local = E // dist.get_world_size()
        g = torch.Generator("cuda").manual_seed(dist.get_rank())

        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=g, device="cuda").bfloat16()

        self.w1, self.w2 = draw(local, 2 * F, D) / D**0.5, draw(local, D, F) / F**0.5
        self.x, self.dout, self.shared = draw(T, D), draw(T, D), draw(D, D) / D**0.5
        self.residual = draw(T, D)
        self.prob = torch.rand(T, top_k, generator=g, device="cuda")
        self.idx = torch.zeros(T, top_k, dtype=torch.int32, device="cuda")
        biases = (draw(local, 2 * F), draw(local, D)) if bias else ()
        self.weights = MLPWeights(self.w1, self.w2, *biases)
        for t in (*self.own, self.x, self.prob, self.shared, self.residual):
            t.requires_grad_()
        for w in self.own if spec.accumulate else ():
            w.main_grad = torch.zeros_like(w, dtype=torch.float32)
        self.statistics: Any = None
        """Statistics of the last call."""
        self.dispatcher = make_dispatcher(
            way.transport,
            group=dist.group.WORLD,
            experts=E,
            slots=TokenChoices(top_k, top_k),
            budget=budget or Budget(64.0, torch.device("cuda")),
            backend="fused",
            symm=symm,
            recipe=spec.recipe,
            fp8_rows=way.fp8_rows and spec.recipe is not None,
            connections=way.connections,
        )

    @property
    def own(self) -> list[Tensor]:
        """Weights, and biases if there are any."""
        return [w for w in self.weights if w is not None]

    def __call__(self, shared: bool, residual: bool = False) -> list[Tensor]:
        """Output, and gradients of tokens, probabilities, weights, and of what is added."""
        for w in self.own if self.spec.accumulate else ():
            w.main_grad.zero_()
        received = self.dispatcher.dispatch(self.x, self.idx, self.prob)
        self.statistics = received.statistics
        with received.saving():
            how = dict(
                overlap=received.overlap, fp8_inputs=received.fp8_inputs, experts=received.experts
            )
            out = grouped_mlp(received.rows_ND, self.weights, received.plan, self.spec, **how)
        sums = self.dispatcher.send_sums(out, received, alone=not shared)
        addends = [self.x @ self.shared] * shared + [self.residual] * residual
        out = self.dispatcher.receive_sums(sums, received, addends)
        leaves = [self.x, self.prob, *self.own, *[self.residual] * residual]
        made = list(torch.autograd.grad(out, leaves, self.dout, allow_unused=True))
        if self.spec.accumulate:
            made[2 : 2 + len(self.own)] = [w.main_grad.clone() for w in self.own]
        return [out.detach(), *made]


def chosen(only: set[str], shape: str, precision: str, known: Iterable[str] = SPECS) -> bool:
    """True if the command line selects both labels, or none of their kinds.

    `known` are the labels of each kind.
    """
    precisions = only & {*known}
    shapes = only - precisions
    return shape in (shapes or {shape}) and precision in (precisions or {precision})


def captured(
    call: Callable[[], list[Tensor]], connections: Connections
) -> Callable[[], list[Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            connections.begin()
            results = call()

    def replay() -> list[Tensor]:
        graph.replay()
        torch.cuda.synchronize()
        return results

    replay.graph = graph  # type: ignore[attr-defined]
    return replay


def compare(ours: list[Tensor], theirs: list[Tensor], what: Any) -> None:
    names = ("out", "dx", "dprob", "dw1", "dw2", "dresidual")
    assert len(ours) == len(theirs)
    for name, a, b in zip(names, ours, theirs, strict=False):
        if not torch.equal(a, b):
            wrong = int((a != b).sum())
            raise SystemExit(f"rank {dist.get_rank()}: {what}: {name} differs in {wrong} places")


def main() -> None:
    if "hier" in sys.argv and on_one_gpu():
        raise SystemExit("hier captures collectives, which gloo cannot: unset PHALANX_ONE_GPU")
    here = join()
    only = {*sys.argv[1:]} - {"hier"}
    pair = ways("hier" in sys.argv, here.connections)
    for label, precision, keep, sms in product(SHAPES, SPECS, (False, True), (0, 8)):
        shape, symm = SHAPES[label], SymmOptions(keep=keep, comm_sms=sms, timeout=20)
        for kind in KINDS:
            top_k = shape[3] if kind == "all experts" else shape[4]
            if top_k <= 16 and chosen(only, f"{label}{sms}", precision):
                check(f"{label} in {precision}", pair, shape, top_k, kind, symm, SPECS[precision])
    torch.cuda.synchronize()
    dist.barrier()
    runtime.stop(here)


def check(
    label: str,
    pair: tuple[Way, Way],
    shape: tuple[int, ...],
    top_k: int,
    kind: str,
    symm: SymmOptions,
    spec: MLPSpec,
) -> None:
    ours, theirs = (Layer(way, shape, top_k, symm, spec) for way in pair)
    g = torch.Generator("cuda").manual_seed(100 + dist.get_rank())
    for shared, residual in ((False, False), (False, True), (True, True)):
        what = f"{label}, {kind}, keep {symm.keep}, {symm.comm_sms} SMs, shared {shared}"
        what += f", residual {residual}"
        graph = None
        for turn in range(6):
            idx = routed(kind, shape[0], shape[3], top_k, g)
            x = torch.randn(ours.x.shape, generator=g, device="cuda").bfloat16()
            with torch.no_grad():
                for layer in (ours, theirs):
                    layer.idx.copy_(idx)
                    layer.x.copy_(x)
            wanted = theirs(shared, residual)
            compare(ours(shared, residual), wanted, f"{what}, turn {turn}")
            if turn == 1:
                graph = captured(lambda s=shared, r=residual: ours(s, r), ours.connections)
            if graph is not None:
                compare(graph(), wanted, f"{what}, replay {turn}")
        del graph
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print("equal:", what, flush=True)


if __name__ == "__main__":
    main()
