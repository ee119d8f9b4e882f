#!/usr/bin/env python
"""Write a routing for model.moe.router.replay by hand or by drawing.

    python scripts/lab/make_routing.py OUT model=MODEL [OVERRIDES] --choices FILE.json
    python scripts/lab/make_routing.py OUT model=MODEL [OVERRIDES] [--weight EXPERT=WEIGHT ...]
        [--tokens N] [--seed N]

The first form writes OUT from choices made by hand: a JSON object with a list for each layer
(layer.1, layer.2, ..., prediction.1 for those of multi-token prediction, "*" for all others), which
has a list for each token of the experts that it chooses, best first:

    {"layer.2": [[0, 1], [0, 2]], "*": [[0, 1], [2, 3]]}

The second form draws the choices of --tokens tokens: --weight 3=8 makes expert 3 eight times as
likely as one that is not named. Without --weight all experts are equally likely.

A run that replays OUT starts over with the first token after the last. scripts/lab/routing_load.py
shows how even it is. It needs no GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.configs.load import load
from phalanx.moe.router.recording import write
from phalanx.scripts.lab.routing_by_hand import random_choices, read_choices
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.reader import may_leave

_TOKENS = 4096


@may_leave
@reports_bad_input("make_routing")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_intermixed_args(argv)
    model = load(args.overrides).model
    if not model.moe.experts:
        raise ValueError(f"{model.name} is a dense model: it has no routers")
    if args.choices:
        if args.weight or args.tokens is not None or args.seed:
            raise ValueError("--choices names all choices: leave out the other options")
        ids = read_choices(args.choices, model)
    else:
        weights = dict(map(weight_of, args.weight))
        tokens = _TOKENS if args.tokens is None else args.tokens
        ids = random_choices(model, weights, tokens, args.seed)
    facts = write(args.out, ids, model=model.name, experts=model.moe.experts, step=0)
    print(
        f"{args.out}: {facts.tokens:,} tokens of {facts.model}, "
        f"{pluralize(len(facts.layers), 'layer')}, top {facts.top_k} of {facts.experts} experts"
    )
    command = ["  train.py", *args.overrides, f"model.moe.router.replay={args.out}"]
    print(programs.here(" ".join(command)))
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("make_routing", __doc__)
    add = p.add_argument
    add("out", type=Path, metavar="OUT")
    taken = programs.here("of the model, as train.py takes them")
    add("overrides", nargs="*", metavar="OVERRIDES", help=taken)
    add("--choices", type=Path, metavar="FILE", help="JSON with the choices")
    add(
        "--weight",
        nargs="+",
        default=[],
        metavar="EXPERT=WEIGHT",
        help="relative likelihood of an expert",
    )
    add("--tokens", type=int, metavar="N", help=f"tokens to draw for; default: {_TOKENS}")
    add("--seed", type=int, default=0, metavar="N", help="of the draw; default: 0")
    return p


def weight_of(text: str) -> tuple[int, float]:
    """Expert and weight of `EXPERT=WEIGHT`, or ValueError."""
    expert, _, weight = text.partition("=")
    try:
        return int(expert), float(weight)
    except ValueError:
        raise ValueError(f"--weight {text}: write EXPERT=WEIGHT, as in 3=8") from None


if __name__ == "__main__":
    sys.exit(main())
