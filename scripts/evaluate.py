#!/usr/bin/env python
"""Evaluate a checkpoint on files: loss, perplexity, bits per byte; scores of tasks.

    python scripts/evaluate.py runs/NAME valid.jsonl data/wiki [--max-tokens N] [--json OUT]
    python scripts/evaluate.py runs/NAME --tasks arithmetic.jsonl mmlu.jsonl

Tasks are files of run.tasks (docs/scores.md): choices, answers, texts.

Files are .jsonl, .json, .txt (or .gz, .zst of these) or .parquet with text, or .bin/.idx pairs by
their prefix. One process, on a GPU if there is one. Documents are joined and cut into sequences of
the run's length, as in training; every token is predicted once, from the tokens before it in its
sequence, or in its document with data.document_mask. Ends of documents count as tokens, their bits
as bits of the text. Bits per byte compare models with different tokenizers. Special tokens that
a text spells are text, as in prepare_data.py, and counted on stderr (--special-text).
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs.tables.capabilities import TASKS
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.text_rows import read_keys
from phalanx.moe.data.token_files import Sidecar
from phalanx.moe.data.tokenizer.encoder import PLAIN, listed
from phalanx.moe.data.tokenizer.special_tokens import sidecars, tokenizers_of
from phalanx.moe.inference import command
from phalanx.moe.inference.command import positive, predictor_of, report_errors
from phalanx.moe.report.progress import progress
from phalanx.moe.text import aligned
from phalanx.parallel.object_store import folder_argument
from phalanx.scripts.output.reader import may_leave

if TYPE_CHECKING:
    from phalanx.moe.inference.scoring import Score

_BATCH = 8
_CPU_TOKENS = 2048  # of a batch; of tasks on a GPU too, whose logits are all computed


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    return report_errors("evaluate", lambda: evaluate(args))


def parser() -> argparse.ArgumentParser:
    p = command.parser("evaluate", __doc__, PLAIN)
    add = p.add_argument
    add("files", nargs="*", metavar="FILE", help="text, or the prefix of a .bin/.idx pair")
    add("--tasks", nargs="+", default=[], metavar="FILE", help="JSON lines, as in run.tasks")
    add(
        "--key",
        action="append",
        default=[],
        metavar="[KIND=]NAME",
        help="JSON key or Parquet column of the text (default: text); with KIND= of jsonl, json or "
        "parquet files alone",
    )
    add("--lines", action="store_true", help="each line of a .txt is a document, not each file")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="of a file: whole documents until it has so many",
    )
    add(
        "--batch",
        type=int,
        metavar="N",
        help=f"sequences at a time (default: {_BATCH}; on a CPU of {_CPU_TOKENS:,} tokens)",
    )
    add("--json", type=folder_argument, metavar="OUT", help="write the numbers")
    return p


def evaluate(args: argparse.Namespace) -> None:
    """Print a row for each file, and one for all of them; `report_errors` tells errors."""
    positive(max_tokens=args.max_tokens, batch=args.batch, context=args.context)
    if not args.files and not args.tasks:
        raise ValueError("nothing to evaluate: name a FILE with text, or --tasks FILE")
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.json and args.json.is_dir():
        raise ValueError(f"--json {args.json} is a folder: name a file in it")
    reading = replace(read_keys(args.key), lines=args.lines)
    with predictor_of(args) as predictor:
        from phalanx.moe.data.tokenizer.codec import codec_of
        from phalanx.moe.inference.scoring import Score, score, text_of

        scored: dict[str, Score] = {}
        vocabulary = predictor.cfg.model.vocab_size

        def codec() -> Any:
            given, choice = (args.tokenizer, args.eod), args.special_text
            return codec_of(predictor.common, vocabulary, *given, special_text=choice)

        options = dict(reading=reading, limit=args.max_tokens)
        options["apart"] = predictor.cfg.data.document_mask
        names = dict.fromkeys(args.files)
        described = sidecars(predictor.common.get("config", {}).get("data", {}))
        for name in names:
            check_pair(name, described)
        with progress("reading", unit="B", unit_scale=True) as bar:
            texts = [text_of(name, codec, **options, progress=bar.update) for name in names]
        for text in texts:
            if text.spelled:
                what = f"special tokens spelled, taken as {args.special_text}"
                print(f"-- {text.name}: {what}: {listed(text.spelled)}", file=sys.stderr)
        total = sum(text.predicted for text in texts)
        on_cpu = predictor.device.type == "cpu"
        batch = args.batch or (_batch_on_cpu(args.context) if on_cpu else _BATCH)
        with progress("predicting", total=total, unit=" tokens") as bar:
            for text in texts:
                scored[text.name] = Score(0.0, 0, 0)
                for part in score(predictor, text, args.context, batch):
                    scored[text.name] += part
                    bar.update(part.tokens)
        tasks: tuple[dict[str, float], str] = {}, ""
        if args.tasks:
            tokens = args.batch * args.context if args.batch else _CPU_TOKENS
            with progress("scoring", unit=" sequences") as bar:
                tasks = resolve_name(TASKS).checkpoint_scores(
                    predictor,
                    codec(),
                    args.tasks,
                    context=args.context,
                    tokens=tokens,
                    progress=bar.update,
                )
        header = {
            "checkpoint": str(predictor.path),
            "step": predictor.step,
            "context": args.context,
            "special_text": args.special_text,
        }
    if scored:
        print(table(scored))
    if tasks[1]:
        print(tasks[1])
    if args.json:
        numbers: dict[str, Any] = {name: content(each) for name, each in scored.items()}
        numbers = {"files": numbers} | ({"tasks": _finite(tasks[0])} if args.tasks else {})
        report = json.dumps(header | numbers, indent=2, allow_nan=False)
        args.json.write_text(report + "\n")


def check_pair(prefix: str, described: list[Sidecar]) -> None:
    """Check that a .bin/.idx pair was prepared with the tokenizer of a run's data.

    What has no description passes, as does every pair if `described` is empty; else a DataError.
    """
    path = Path(f"{Path(prefix).expanduser()}.json")
    if not (described and path.is_file() and path.with_suffix(".idx").is_file()):
        return
    own = Sidecar.read(path)
    if not any(own.same_tokenizer(each) for each in described):
        raise DataError(
            f"{prefix} was prepared with the tokenizer {own.tokenizer}, and the data of the run "
            f"with {tokenizers_of(described)}: prepare its text with that one"
        )


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _batch_on_cpu(context: int) -> int:
    """Sequences per batch: few, so that progress is visible; more are no faster on a CPU."""
    return max(1, min(_BATCH, _CPU_TOKENS // context))


def table(scores: dict[str, "Score"]) -> str:
    rows = [["file", "tokens", "bytes", "loss", "perplexity", "bits/byte"]]
    entries = list(scores.items())
    if len(scores) > 1:
        first, *others = scores.values()
        entries.append(("all", sum(others, replace(first))))
    for name, each in entries:
        bits, text_bytes = each.bits_per_byte, each.text_bytes
        rows.append(
            [
                name,
                f"{each.tokens:,}",
                "?" if text_bytes is None else f"{text_bytes:,}",
                f"{each.loss:.4f}",
                f"{each.perplexity:.4g}",
                "?" if bits is None else f"{bits:.4f}",
            ]
        )
    return aligned(rows)


def content(score: "Score") -> dict[str, Any]:
    """Numbers of a file for --json; null if unknown or infinite."""
    return {
        "tokens": score.tokens,
        "bytes": score.text_bytes,
        "loss": score.loss,
        "perplexity": score.perplexity if math.isfinite(score.perplexity) else None,
        "bits_per_byte": score.bits_per_byte,
    }


if __name__ == "__main__":
    sys.exit(main())
