#!/usr/bin/env python
"""Generate text from a checkpoint of any layout, in one process.

    python scripts/sample.py runs/NAME --prompt 'def main(' [--tokens 100] [--temperature 0.8]

The newest checkpoint of a run, or the one of --step, is loaded as a model on one GPU, or on the CPU
of a machine without one. Greedy unless --temperature is set. The tokenizer is that of the run's
data if it is known: bytes for data=embedded and for prepare_data.py --bytes, else --tokenizer names
it. Several prompts are computed together; a line before each text numbers it. Special tokens that a
prompt spells are tokens, as in templates of chats; --special-text plain takes them as text.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs.knobs import pluralize
from phalanx.moe.data.tokenizer.encoder import SPECIAL, listed
from phalanx.moe.inference import command
from phalanx.moe.inference.command import positive, predictor_of, report_errors
from phalanx.scripts.output.reader import may_leave

if TYPE_CHECKING:
    from phalanx.moe.inference.generation import Piece


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
    add("--chat", action="store_true", help="a prompt is what a user says, by the chat template")
    add("--chat-template", metavar="FILE", help=command.TEMPLATE_HELP)
    add("--stop", action="append", metavar="TEXT", help="ends a text before it; may be repeated")
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
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K most likely tokens")
    add("--seed", type=int, default=0, metavar="N", help="of the drawing (default: 0)")
    add("--no-stop", action="store_true", help="go on behind the end of a document")
    add("--batch", type=int, default=8, metavar="N", help="most prompts at a time (default: 8)")
    add(
        "--no-cache", action="store_true", help="send all tokens through the model for each new one"
    )
    return p


def sample(args: argparse.Namespace) -> None:
    """Print a continuation of every prompt; `report_errors` tells errors."""
    positive(tokens=args.tokens, context=args.context, batch=args.batch)
    if "" in (args.stop or ()):
        raise ValueError("--stop: an empty text is everywhere")
    from phalanx.moe.data.tokenizer.codec import codec_of, shown
    from phalanx.moe.inference.chat import chat_of
    from phalanx.moe.inference.generation import Batch, texts
    from phalanx.moe.inference.sampling import Sampler
    from phalanx.moe.inference.text import started

    prompts = args.prompt or [""]
    # A text does not depend on how many others there are.
    samplers = [
        Sampler(args.temperature, args.top_p, args.seed + number, args.top_k)
        for number in range(len(prompts))
    ]
    with predictor_of(args) as predictor:
        vocabulary = predictor.cfg.model.vocab_size
        given, choice = (args.tokenizer, args.eod), args.special_text
        codec = codec_of(predictor.common, vocabulary, *given, special_text=choice)
        template = (args.tokenizer, args.chat_template, predictor.common, codec)
        chat = chat_of(*template) if args.chat else None
        if args.chat and chat is None:
            raise ValueError(command.NO_TEMPLATE)
        print(f"-- {predictor.path}: step {predictor.step}", file=sys.stderr)
        ids = []
        for prompt in prompts:
            text = chat.text([{"role": "user", "content": prompt}]) if chat else prompt
            alone = predictor.cfg.data.document_mask or chat is not None
            ids.append(started(codec, text, alone=alone))
            if spelled := Counter(token for token, _ in codec.encoder.spelled(prompt)):
                what = f"special tokens in the prompt, taken as {choice}"
                print(f"-- {what}: {listed(spelled)}", file=sys.stderr)
        ends = () if args.no_stop else codec.ends
        page = Page([shown(prompt) + "\n" * (chat is not None) for prompt in prompts])
        for first in range(0, len(prompts), args.batch):
            rows = slice(first, first + args.batch)
            batch = Batch(
                predictor,
                ids[rows],
                samplers[rows],
                args.tokens,
                context=args.context,
                ends=ends,
                cache=not args.no_cache,
            )
            page.began = time.perf_counter()
            page.show()
            for piece in texts(batch, codec, ids[rows], args.stop or ()):
                page.add(first + piece.new.row, piece)


class Page:
    """Texts on stdout, one after another: the first as it grows, others when they are next."""

    def __init__(self, prompts: list[str]) -> None:
        self.began = 0.0
        several = len(prompts) > 1
        self._waiting = [
            f"-- text {number} of {len(prompts)}\n{prompt}" if several else prompt
            for number, prompt in enumerate(prompts, 1)
        ]
        self._counts, self._notes = [0] * len(prompts), [""] * len(prompts)
        self._number = 0  # of the text that grows

    def add(self, number: int, piece: "Piece") -> None:
        """Add a piece to a text, and print what can be."""
        self._waiting[number] += piece.text
        self._counts[number] += not piece.new.ends
        if piece.finish:
            count, seconds = self._counts[number], time.perf_counter() - self.began
            self._notes[number] = f"-- {pluralize(count, 'token')}, {count / seconds:.1f} tokens/s"
        self.show()

    def show(self) -> None:
        """Print what can be: the text that grows, and those behind it if it is complete."""
        while self._number < len(self._waiting):
            print(self._waiting[self._number], end="", flush=True)
            self._waiting[self._number] = ""
            if not (note := self._notes[self._number]):
                return
            print(flush=True)
            print(note, file=sys.stderr)
            self._number += 1


if __name__ == "__main__":
    sys.exit(main())
