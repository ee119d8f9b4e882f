#!/usr/bin/env python
"""Measure what a checkpoint has of a long context: loss by position, and codes found in the text.

    python scripts/lab/proof/long_context.py runs/NAME data/corpus/held_out/long --context 32768 \
        --json after.json [--step N] [--short 4096] [--documents 64] [--repeats 5]

Documents of the text with at least --context tokens are read whole, and then in pieces of --short
tokens, of which none sees the one before: what the long context is worth is the difference at the
same tokens. The loss is the mean over documents in sixteen ranges of positions. Then come needles
(needles.py), at both lengths. plot_long_context.py makes a picture and a table of the files of one
or more checkpoints.

Legend: D documents, S tokens of a document, P ranges of positions, N tokens of the text.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

from phalanx.configs.knobs import pluralize
from phalanx.moe.data.token_files import open_corpus
from phalanx.moe.data.tokenizer.encoder import PLAIN
from phalanx.moe.inference import command
from phalanx.moe.inference.command import positive, predictor_of, report_errors
from phalanx.moe.report.progress import progress
from phalanx.scripts.lab.proof.needles import ask, questions

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor

RANGES = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    return report_errors("long_context", lambda: measure(args))


def parser() -> argparse.ArgumentParser:
    p = command.parser("long_context", __doc__, PLAIN)
    add = p.add_argument
    add("text", metavar="PREFIX", help="held-out long documents, a pair of prepare_data.py")
    add("--short", type=int, default=4096, metavar="N", help="tokens of a piece (%(default)s)")
    add("--documents", type=int, default=64, metavar="N", help="at most (default: %(default)s)")
    add("--repeats", type=int, default=5, metavar="N", help="needles of a form and depth (5)")
    add("--seed", type=int, default=1, metavar="N", help="of the needles (default: 1)")
    add("--json", type=Path, required=True, metavar="OUT", help="file of the numbers")
    return p


def measure(args: argparse.Namespace) -> None:
    """Write the numbers of a checkpoint; `report_errors` tells errors."""
    positive(short=args.short, documents=args.documents, repeats=args.repeats, context=args.context)
    with predictor_of(args) as predictor:
        from phalanx.moe.data.tokenizer.codec import codec_of

        context, short = args.context, args.short
        if context % RANGES or context % short or short >= context:
            raise ValueError(
                f"--context {context}: it must be a multiple of {RANGES} and of --short {short}, "
                "and longer"
            )
        vocabulary = predictor.cfg.model.vocab_size
        codec = codec_of(predictor.common, vocabulary, args.tokenizer, args.eod)
        if not codec.ends:
            raise ValueError("the token that ends a document is not known: give --eod TOKEN")
        end = codec.ends[0]
        rows_DS, ids_N = documents(args.text, end, context, args.documents)
        drawn = [
            (size, question)
            for size in (short, context)
            for question in questions(
                ids_N, codec.encode, end, context=size, repeats=args.repeats, seed=args.seed
            )
        ]
        with progress("reading", total=2 * len(rows_DS), unit=" documents") as bar:
            positions = {
                name: by_position(predictor, rows_DS, size, bar.update)
                for name, size in (("whole", context), ("pieces", short))
            }
        found = []
        with progress("asking", total=len(drawn), unit=" needles") as bar:
            for size, question in drawn:
                about = {"context": size, "form": question.form, "depth": question.depth}
                found.append(about | asdict(ask(predictor, question)))
                bar.update(1)
        report = {
            "checkpoint": str(predictor.path),
            "step": predictor.step,
            "trained_context": predictor.cfg.data.sequence_length,
            "context": context,
            "short": short,
            "documents": len(rows_DS),
            "loss": positions,
            "needles": found,
        }
    args.json.write_text(as_text(report))
    numbers = pluralize(len(rows_DS), "document"), pluralize(len(found), "needle")
    print(f"{args.json}: step {report['step']}, {', '.join(numbers)}")


def as_text(report: dict[str, Any]) -> str:
    """JSON of a report, a needle on a line, with as many digits as its numbers are worth."""
    loss = {way: [round(x, 5) for x in nats] for way, nats in report["loss"].items()}
    rows = [json.dumps(n | {"nats": round(n["nats"], 4)}) for n in report["needles"]]
    needles = '"needles": [\n  ' + ",\n  ".join(rows) + "\n ]"
    text = json.dumps(report | {"loss": loss, "needles": []}, indent=1)
    return text.replace('"needles": []', needles) + "\n"


def documents(prefix: str, end: int, context: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Beginnings of long documents, int64 [D, S + 1] with the end token before, and all tokens."""
    corpus = open_corpus(prefix)
    ids_N = np.memmap(f"{prefix}.bin", corpus.dtype, "r")
    ends = np.cumsum(corpus.lengths, dtype=np.int64)
    long = np.flatnonzero(corpus.lengths >= context)[:most]
    if not len(long):
        raise ValueError(f"{prefix} has no document of {context} tokens: lower --context")
    starts = ends[long] - corpus.lengths[long]
    rows = [np.append(end, ids_N[start : start + context]) for start in starts]
    return np.stack(rows).astype(np.int64), ids_N


def by_position(
    predictor: "Predictor", rows_DS: np.ndarray, size: int, update: Callable[[int], Any]
) -> list[float]:
    """Mean loss of each range of positions, in nats, if the model sees pieces of `size` tokens."""
    import torch

    total_P = np.zeros(RANGES)
    for row_S in rows_DS:
        tokens, labels = (torch.from_numpy(x).view(-1, size) for x in (row_S[:-1], row_S[1:]))
        loss_S = predictor.losses(tokens, labels).double().flatten().cpu().numpy()
        total_P += loss_S.reshape(RANGES, -1).mean(1)
        update(1)
    return [float(x) for x in total_P / len(rows_DS)]


if __name__ == "__main__":
    sys.exit(main())
