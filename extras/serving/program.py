"""From the command line to a server that listens."""

import argparse
import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.extras.serving.local import listening, needing_packages, run
from phalanx.moe.inference.command import predictor_of
from phalanx.parallel.checkpoint.saved_config import checkpoint_of
from phalanx.parallel.object_store import Place, argument


def serve(args: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM. Errors are those of `report_errors`."""
    with needing_packages():
        from phalanx.extras.serving.app import app
    from phalanx.extras.serving.engine import Engine

    with listening(args.host, args.port) as (listener, address):
        engine = Engine(lambda: checkpoint_of(args.run, args.step), _Opener(args), args.batch)
        facts = engine.facts
        print(f"-- {facts.path}: step {facts.step}; {address}", file=sys.stderr, flush=True)
        run(app(engine, args.host), listener)


class _Opener:
    """Opens the model of a checkpoint with the options of the command line."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    @contextmanager
    def __call__(self, path: Place) -> Iterator[Any]:
        from phalanx.extras.serving.engine import Model
        from phalanx.moe.data.tokenizer.codec import codec_of
        from phalanx.moe.inference.chat import chat_of

        args = copy.copy(self._args)
        args.run, args.step = argument(str(path)), None
        with predictor_of(args) as predictor:
            codec = codec_of(
                predictor.common,
                predictor.cfg.model.vocab_size,
                args.tokenizer,
                args.eod,
                special_text=args.special_text,
            )
            chat = chat_of(args.tokenizer, args.chat_template, predictor.common, codec)
            yield Model(predictor, codec, chat, args.context)
