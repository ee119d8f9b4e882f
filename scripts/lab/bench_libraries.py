"""Speed and results of operations that a library has too, on one GPU: a table in Markdown.

    python scripts/lab/bench_libraries.py [PART ...] [--rounds N]

  router     top-k and weights         against Transformer Engine's fused router
  rope       queries, keys and values  against Transformer Engine's fused rotary embedding
  adam       a step of the optimizer   against Transformer Engine's FusedAdam
  mla        rotary part of latent attention, against Megatron-Core's fused kernels
  attention  flash-attn-4, which `kernels.attention=fa4` runs, against the other backends
  loss       and its gradient in one pass, against QuACK's and against two passes
  quantize   rows, weights and transposes to FP8, against a copy of as many bytes

Times are medians of interleaved rounds on the GPU, the L2 cache flushed before each. A comparison
whose library is missing has the error as its note; exit code 1 is for ours alone, and for results
that are NaN or infinite.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phalanx.configs import programs
from phalanx.scripts.cluster.facts import facts
from phalanx.scripts.lab.bench.clocks import Gpu
from phalanx.scripts.lab.bench.libraries import attention, libraries, loss, quantize
from phalanx.scripts.lab.bench.libraries.compared import HEAD, Row
from phalanx.scripts.lab.bench.records import facts_line
from phalanx.scripts.lab.bench.timing import Bench, reason

PARTS = libraries.PARTS | {
    "attention": attention.attention,
    "loss": loss.losses,
    "quantize": quantize.quantizing,
}


def run(bench: Bench, parts: Sequence[str], sizes: libraries.Sizes) -> list[Row]:
    """Rows of all parts, printed as they come; a part that fails is one row."""
    print(f"\n{HEAD}", flush=True)
    rows: list[Row] = []
    for part in parts:
        try:
            for batch in PARTS[part](bench, sizes):
                print("\n".join(row.markdown() for row in batch), flush=True)
                rows += batch
        except Exception as error:
            rows.append(Row(part, "", "", None, None, None, reason(error)))
            print(rows[-1].markdown(), flush=True)
        bench.clock.free()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = programs.parser("bench_libraries", __doc__)
    names = list(PARTS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    unknown = [part for part in args.parts if part not in names]
    if unknown:
        parser.error(f"{unknown[0]}: a part is one of {', '.join(names)}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    import torch

    if not torch.cuda.is_available():
        print("this script measures on a CUDA device, and there is none", file=sys.stderr)
        return 1
    bench = Bench(Gpu(), args.rounds)
    rows = run(bench, args.parts or names, libraries.Sizes())
    known_facts = facts(bench.clock.device, sys.argv[1:] if argv is None else list(argv))
    print(f"\n{facts_line(known_facts)}")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
