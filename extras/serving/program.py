"""From the command line to a server that listens."""

import argparse
import copy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.moe.inference.command import predictor_of
from phalanx.parallel.checkpoint.saved_config import checkpoint_of
from phalanx.parallel.object_store import Place, argument

_LEAVING = 3  # seconds for responses that are under way when the server ends


def serve(args: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM. Errors are those of `report_errors`."""
    try:
        import uvicorn

        from phalanx.extras.serving.app import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        needed = f"this needs the package {missing.name}: pip install 'phalanx-moe[serve]'"
        raise ValueError(needed) from None
    from phalanx.extras.serving.engine import Engine

    with _listening(args.host, args.port) as listener:
        engine = Engine(lambda: checkpoint_of(args.run, args.step), _Opener(args), args.batch)
        facts, port = engine.facts, listener.getsockname()[1]
        host = f"[{args.host}]" if ":" in args.host else args.host
        told = f"-- {facts.path}: step {facts.step}; http://{host}:{port}"
        print(told, file=sys.stderr, flush=True)
        config = uvicorn.Config(
            app(engine, args.host),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_LEAVING,
        )
        uvicorn.Server(config).run(sockets=[listener])


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


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket, before a model is loaded for minutes; an OSError names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cannot listen on {host}:{port}: {reason}; choose a --port") from None
        yield listener
