"""Speed of the Hopper kernels beside torch's: medians of interleaved runs, the L2 cache flushed.

    python scripts/bench_kernels.py [--rounds 30] [--margins 8 16 24 32] [--ragged]

Each variant is captured in a CUDA graph, so that host time is not measured; a round runs every
variant once, so that a falling clock meets all of them. TFLOP/s = 2 * rows * N * K / time.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.sm90.launch import rows

SHAPES = ((65536, 2048, 7168, 32), (32768, 2880, 2880, 4), (65536, 768, 2048, 16))
"""Rows, K, N, experts."""
TILES = ((256, 2), (256, 1), (192, 2), (192, 1), (128, 2))
FLUSH_BYTES = 256 * 2**20


def splits(S: int, L: int, multiple: int) -> Tensor:
    """Device offsets of L experts, drawn from Dirichlet(8) and rounded to `multiple` rows."""
    torch.manual_seed(0)
    share = torch.distributions.Dirichlet(torch.full((L,), 8.0)).sample()
    ends = (share.cumsum(0) * S / multiple).round() * multiple
    ends[-1] = S
    return torch.cat([torch.zeros(1), ends]).to(torch.int32).cuda()


def variants(S: int, K: int, N: int, L: int, args: argparse.Namespace) -> dict[str, Callable]:
    """What to run for a shape, by name."""
    a = torch.randn(S, K, device="cuda").to(torch.bfloat16)
    w = (torch.randn(L, N, K, device="cuda") * K**-0.5).to(torch.bfloat16)
    w_kn = w.mT.contiguous().mT
    offsets = splits(S, L, 1 if args.ragged else 128)
    out = torch.empty(S, N, dtype=torch.bfloat16, device="cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")

    def ours(w: Tensor = w, **options) -> Callable:
        return lambda: rows(a, w, offsets, out_SN=out, counter=counter, **options)

    named: dict[str, Callable] = {
        "torch [L, N, K]": lambda: torch._grouped_mm(a, w.mT, offs=offsets[1:]),
        "torch [L, K, N]": lambda: torch._grouped_mm(a, w_kn.mT, offs=offsets[1:]),
    }
    for tile in TILES:
        named[f"rows {tile[0]}x{tile[1]}"] = ours(tile=tile)
    named["rows, default tile, static"] = ours(dynamic=False)
    named["rows, default tile, [L, K, N]"] = ours(w_kn)
    for margin in args.margins:
        named[f"rows, default tile, {margin} SMs free"] = ours(sm_margin=margin)
    return named


def capture(run: Callable) -> torch.cuda.CUDAGraph:
    """A graph of one call, after one call to compile and warm up."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure(named: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    graphs = {name: capture(run) for name, run in named.items()}
    times: dict[str, list[float]] = {name: [] for name in named}
    for round_ in range(rounds + 3):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_ >= 3:
                times[name].append(begin.elapsed_time(end))
    return {name: median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--margins", type=int, nargs="*", default=[8, 16, 24, 32])
    parser.add_argument("--ragged", action="store_true", help="experts end at any row")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "rounds", args.rounds)
    for S, K, N, L in SHAPES:
        print(f"\nrows {S}, K {K}, N {N}, experts {L}")
        for name, ms in measure(variants(S, K, N, L, args), args.rounds).items():
            print(f"  {name:36} {ms:8.3f} ms {2e-9 * S * K * N / ms:7.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
