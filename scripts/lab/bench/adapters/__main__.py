"""Speed of the adapters: models of transformers and the layer of torchtitan, on one GPU.

    python -m phalanx.scripts.lab.bench.adapters [PART ...] [--rounds N]

  qwen3       4 layers of Qwen3-30B-A3B in transformers, 8,192 tokens, against its `grouped_mm`,
              `eager` and `sonicmoe` (the package sonic-moe, if it is installed)
  qwen3_loss  the same with the embedding, the head and the loss; not in CUDA graphs
  gpt_oss     4 layers of GPT-OSS-20B in transformers, likewise, and with converted weights
  torchtitan  its routed experts in the sizes of Qwen3-30B-A3B, against its own and its fused ones

Parameters and inputs are bf16. Times are medians of interleaved rounds of forward and backward,
eager and in CUDA graphs; the last column has the largest difference of the outputs to ours, over
their largest value. Exit code 1: one of ours did not run.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from phalanx.scripts.lab.bench.adapters.compared import HEAD, Comparison
from phalanx.scripts.lab.bench.clocks import Cpu, Gpu
from phalanx.scripts.lab.bench.timing import Bench, reason


def part(name: str, bench: Bench, *, tiny: bool) -> Comparison:
    """The comparison of this name; its framework is imported."""
    if name == "torchtitan":
        from phalanx.scripts.lab.bench.adapters import titan

        return titan.layer(bench, titan.TINY if tiny else titan.QWEN3)
    from phalanx.scripts.lab.bench.adapters import hf

    return getattr(hf, name)(bench, tiny=tiny)


PARTS = ("qwen3", "qwen3_loss", "gpt_oss", "torchtitan")


def run(bench: Bench, parts: Sequence[str], *, tiny: bool) -> Iterator[bool]:
    """Print the rows of each part as they come; true for each that has times of ours."""
    print(HEAD, flush=True)
    for name in parts:
        try:
            compared = part(name, bench, tiny=tiny)
            compared.run()
            print("\n".join(compared.rows()), flush=True)
            yield compared.ours_ran
            del compared
        except Exception as error:
            print(f"| {name} | | | | | | {reason(error)} |", flush=True)
            yield False
        bench.clock.free()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes in fp32, on a CPU too")
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]}: a part is one of {', '.join(PARTS)}")
    import torch

    if not (torch.cuda.is_available() or args.tiny):
        print("this program measures on a CUDA device, and there is none", file=sys.stderr)
        return 1
    clock = Gpu() if torch.cuda.is_available() else Cpu()
    done = list(run(Bench(clock, args.rounds), args.parts or PARTS, tiny=args.tiny))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
