#!/usr/bin/env python
"""Count zeros in the activations of experts, and tiles of a matrix product that are all zero.

    python scripts/lab/proof/zero_tiles.py runs/NAME data/corpus/held_out/c [--steps 400 800 ...] \
        [--tokens 65536] [--json zeros.json] [--plot zeros.png]

With model.moe.activation=squared_relu many activations are 0. A kernel can skip none of them, but
tiles of 128 rows and 64 channels in which all are 0: in the product of fc2, in its two gradients
and in those of fc1, five of the six products of an expert without a gate. Of each layer the table
has the share of zeros and that of such tiles, with rows and channels of an expert in these orders:

  as they are
  channels          by how many rows they are not zero in
  rows              along the direction in which they differ most (the first principal component)
  both              rows likewise, and channels by their part in that direction
  tile's channels   rows as in `rows`, and each tile of rows with channels in its own order: what no
                    order of all rows can exceed, and no kernel has

`gain` is 5/6 of the largest share but the last: the part of the time of an expert MLP that skipping
could save if it cost nothing. Rows are those of one forward pass over --tokens tokens of the text.

Legend: R rows of an expert, F channels, D hidden, B sequences, S tokens.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from phalanx.configs.knobs import pluralize
from phalanx.moe.data.token_files import open_corpus
from phalanx.moe.data.tokenizer.encoder import PLAIN
from phalanx.moe.inference import command
from phalanx.moe.inference.command import positive, predictor_of, report_errors
from phalanx.moe.text import aligned
from phalanx.scripts.output.pictures import pyplot

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor

ROWS, CHANNELS = 128, 64
ORDERS = ("as they are", "channels", "rows", "both", "tile's channels")
_PRODUCTS = 5 / 6  # that skip the tiles of an expert MLP without a gate

Layer = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    return report_errors("zero_tiles", lambda: measure(args))


def parser() -> argparse.ArgumentParser:
    p = command.parser("zero_tiles", __doc__, PLAIN)
    add = p.add_argument
    add("text", metavar="PREFIX", help="held-out text, a pair of prepare_data.py")
    add("--steps", type=int, nargs="+", metavar="N", help="checkpoints (default: the newest)")
    add("--tokens", type=int, default=65536, metavar="N", help="(default: %(default)s)")
    add("--json", type=Path, metavar="OUT", help="file of the numbers")
    add("--plot", type=Path, metavar="PNG", help="draw the picture")
    return p


def measure(args: argparse.Namespace) -> None:
    """Print a table for each checkpoint; `report_errors` tells errors."""
    positive(tokens=args.tokens, context=args.context)
    reports = []
    for step in args.steps or [args.step]:
        args.step = step
        with predictor_of(args) as predictor:
            layers = of_layers(predictor, text(args.text, args.context, args.tokens))
            reports.append({"step": predictor.step, "layers": layers})
        print(f"step {reports[-1]['step']}\n{table(layers)}\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"tokens": args.tokens, "steps": reports}) + "\n")
    if args.plot:
        plot(reports, args.plot)


def text(prefix: str, context: int, tokens: int) -> Tensor:
    """The first tokens of a text in sequences, int64 [B, S]."""
    sequences = tokens // context
    ids = np.memmap(f"{prefix}.bin", open_corpus(prefix).dtype, "r")
    if not sequences or len(ids) < sequences * context:
        raise ValueError(
            f"--tokens {tokens}: {prefix} has {pluralize(len(ids), 'token')}, and a sequence has "
            f"{context}"
        )
    return torch.from_numpy(ids[: sequences * context].astype(np.int64)).view(-1, context)


def of_layers(predictor: "Predictor", tokens_BS: Tensor) -> list[Layer]:
    """Shares of each MoE layer in a forward pass."""
    from phalanx.kernels.expert_mlp.reference import activation
    from phalanx.moe.experts import Experts

    found: list[Layer] = []

    def count(experts: Any, inputs: tuple[Any, ...]) -> None:
        if not isinstance(experts, Experts):
            return
        act, received = experts.spec.activation, inputs[0]
        if act.gated:
            raise ValueError(
                f"model.moe.activation={act.kind} has a gate: no activation of it is zero"
            )
        if received.fp8_inputs is not None:
            raise ValueError("rows arrive in FP8: measure a run in bf16")
        offsets, index_S = received.plan.offsets.tolist(), received.plan.row_index_S
        layers = []
        for e, (begin, end) in enumerate(pairwise(offsets)):
            x_RD = received.rows_ND[begin:end]
            if index_S is not None:
                rows = index_S[begin:end]
                x_RD = received.rows_ND[rows[rows >= 0].long()]
            h_RF = x_RD @ experts.w1[e].T
            if experts.b1 is not None:
                h_RF = h_RF + experts.b1[e]
            layers.append(of_expert(activation(h_RF, act) != 0))
        found.append(mean(layers))

    with register_module_forward_pre_hook(count):
        predictor.losses(tokens_BS, tokens_BS)
    if not found:
        raise ValueError(f"{predictor.path} has no MoE layer of this project: kernels=auto")
    return found


def of_expert(some_RF: Tensor) -> Layer:
    """Shares of an expert from where its activations are not zero; its number of rows is `weight`.

    Tiles at the ends, of fewer rows or channels, are left out of the shares of tiles.
    """
    R, F = len(some_RF) // ROWS * ROWS, some_RF.shape[1] // CHANNELS * CHANNELS
    if not R or not F:
        return {"weight": 0.0}
    some_RF = some_RF[:R]
    by_channel = some_RF.sum(0).argsort(descending=True)
    along_R, along_F = direction(some_RF)
    by_row = along_R.argsort()
    orders = {
        "as they are": some_RF,
        "channels": some_RF[:, by_channel],
        "rows": some_RF[by_row],
        "both": some_RF[by_row][:, along_F.argsort()],
    }
    shares = {name: zero_tiles(x[:, :F]) for name, x in orders.items()}
    empty = ~some_RF[by_row].view(-1, ROWS, some_RF.shape[1]).any(1)
    shares["tile's channels"] = float(
        (empty.sum(1) // CHANNELS).sum() / (len(empty) * F / CHANNELS)
    )
    return {"weight": float(R), "zeros": float((~some_RF).float().mean()), **shares}


def zero_tiles(some_RF: Tensor) -> float:
    """Share of tiles without an element."""
    R, F = some_RF.shape
    tiles = some_RF.view(R // ROWS, ROWS, F // CHANNELS, CHANNELS)
    return float((~tiles.any(3).any(1)).float().mean())


def direction(some_RF: Tensor) -> tuple[Tensor, Tensor]:
    """Places of rows and of channels along the first principal component."""
    x_RF = some_RF.float()
    x_RF = x_RF - x_RF.mean(0)
    along_F = x_RF[0]
    for _ in range(30):  # power iteration
        along_F = torch.nn.functional.normalize(x_RF.T @ (x_RF @ along_F), dim=0)
    return x_RF @ along_F, along_F


def mean(layers: Sequence[Layer]) -> Layer:
    """Mean of experts by their rows."""
    rows = sum(layer["weight"] for layer in layers)
    if not rows:
        raise ValueError(f"no expert has {ROWS} rows: more --tokens")
    names = ("zeros", *ORDERS)
    return {n: sum(x["weight"] * x[n] for x in layers if x["weight"]) / rows for n in names}


def gain(layer: Layer) -> float:
    return _PRODUCTS * max(layer[order] for order in ORDERS[:-1])


def table(layers: Sequence[Layer]) -> str:
    columns: dict[str, Callable[[Layer], float]] = {"zeros": lambda x: x["zeros"]}
    columns |= {order: lambda x, order=order: x[order] for order in ORDERS}  # type: ignore[misc]
    columns["gain"] = gain
    rows = [["layer", *columns]]
    rows += [
        [str(number), *(f"{100 * value(layer):.1f} %" for value in columns.values())]
        for number, layer in enumerate(layers, start=1)
    ]
    return aligned(rows)


def plot(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Zeros of each checkpoint by layer, and tiles of the last one by order."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for report in reports:
        shares = [100 * layer["zeros"] for layer in report["layers"]]
        left.plot(range(1, len(shares) + 1), shares, marker=".", label=f"step {report['step']}")
    for order in ORDERS:
        shares = [100 * layer[order] for layer in reports[-1]["layers"]]
        right.plot(range(1, len(shares) + 1), shares, marker=".", label=order)
    left.set(xlabel="MoE layer", ylabel="activations that are zero, %", ylim=(0, 100))
    right.set(xlabel="MoE layer", ylabel=f"zero tiles of {ROWS} x {CHANNELS}, %")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
