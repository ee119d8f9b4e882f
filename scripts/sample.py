#!/usr/bin/env python
"""Generate text from a checkpoint of any layout, in one process.

    python scripts/sample.py runs/NAME --prompt 'def main(' [--tokens 100] [--temperature 0.8]

The newest checkpoint of a run, or the one of --step, is loaded as a model on one GPU, or on the CPU
of a machine without one. Greedy unless --temperature is set. Every new token runs the whole text
through the model, without a KV cache. The tokenizer is that of the run's data if it is known: bytes
for data=embedded and for prepare_data.py --bytes, else --tokenizer names it. With several prompts,
a line before each text numbers it. Special tokens that a prompt spells are tokens, as in
templates of chats; --special-text plain takes them as text.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs.knobs import pluralize
from phalanx.moe.data.tokenizer.encoder import SPECIAL, listed
from phalanx.moe.inference import command
from phalanx.moe.inference.command import positive, predictor_of, report_errors
from phalanx.scripts.output.reader import may_leave

if TYPE_CHECKING:
    from phalanx.moe.data.tokenizer.codec import Codec


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    return report_errors("sample", lambda: sample(args))


def parser() -> argparse.ArgumentParser:
    p = command.parser("sample", __doc__, SPECIAL)
    add = p.add_argument
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be repeated, each has a text of its own; without one a new document begins",
    )
    add("--tokens", type=int, default=64, metavar="N", help="most new tokens (default: 64)")
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="divides the logits before drawing; 0, the default, takes the most likely token",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the most likely tokens that have probability P together (default: 1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the drawing (default: 0)")
    add("--no-stop", action="store_true", help="go on behind the end of a document")
    return p


def sample(args: argparse.Namespace) -> None:
    """Print a continuation of every prompt; `report_errors` tells errors."""
    positive(tokens=args.tokens, context=args.context)
    import torch

    from phalanx.moe.data.tokenizer.codec import codec_of, shown
    from phalanx.moe.run.callbacks.samples import Sampler, generate

    sampler = Sampler(args.temperature, args.top_p, args.seed)
    with predictor_of(args) as predictor:
        vocabulary = predictor.cfg.model.vocab_size
        given, choice = (args.tokenizer, args.eod), args.special_text
        codec = codec_of(predictor.common, vocabulary, *given, special_text=choice)

        def following(ids: list[int]) -> int:
            return sampler(predictor.next_logits(torch.tensor([ids])))

        print(f"-- {predictor.path}: step {predictor.step}", file=sys.stderr)
        prompts = args.prompt or [""]
        for number, prompt in enumerate(prompts, 1):
            alone = predictor.cfg.data.document_mask
            ids, began = started(codec, prompt, alone=alone), time.perf_counter()
            if spelled := Counter(token for token, _ in codec.encoder.spelled(prompt)):
                what = f"special tokens in the prompt, taken as {choice}"
                print(f"-- {what}: {listed(spelled)}", file=sys.stderr)
            ends = () if args.no_stop else codec.ends
            new = generate(following, ids, args.tokens, context=args.context, ends=ends)
            if len(prompts) > 1:
                print(f"-- text {number} of {len(prompts)}")
            print(shown(prompt), end="", flush=True)
            count = write(codec, new, codec.encode(prompt))
            rate = count / (time.perf_counter() - began)
            print(flush=True)
            print(f"-- {pluralize(count, 'token')}, {rate:.1f} tokens/s", file=sys.stderr)


def started(codec: "Codec", prompt: str, *, alone: bool) -> list[int]:
    """Ids of a prompt, preceded by an end-of-document token if one is known.

    `alone`: in training no document attends to the one before it. Raises ValueError without any
    token.
    """
    ids = [*codec.ends[: 0 if alone else 1], *codec.encode(prompt)]
    if not ids and alone:
        raise ValueError("with data.document_mask nothing predicts a first token: give --prompt")
    if not ids:
        raise ValueError("nothing tells which token begins a document: give --prompt or --eod")
    return ids


def write(codec: "Codec", ids: Iterable[int], before: list[int]) -> int:
    """Print the text of ids as they come, whole characters at a time; returns their number.

    The text of `before`, ids of the prompt, is not printed.
    """
    seen: list[int] = []
    shown = ""
    for number in ids:
        seen.append(number)
        text = codec.continuation(before, seen)
        if text.startswith(shown) and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    # The bytes of an incomplete last character.
    print(codec.continuation(before, seen)[len(shown) :], end="")
    return len(seen)


if __name__ == "__main__":
    sys.exit(main())
