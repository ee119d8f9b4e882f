#!/usr/bin/env python
"""Look at a checkpoint in a browser, or by a client of OpenAI's API, on this machine.

    python scripts/serve.py runs/NAME [--port 8000]

One page shows text as it comes, with the probability of each token, and loads the newest checkpoint
at a button. /v1/models, /v1/completions and /v1/chat/completions are those of OpenAI, with streams.
One process, one model on one GPU or on the CPU; requests wait for each other. There are no users
and no keys: it listens on 127.0.0.1 unless --host says otherwise. Needs `pip install
'phalanx-moe[serve]'`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs.tables.programs import SERVE
from phalanx.moe.data.tokenizer.encoder import SPECIAL
from phalanx.moe.inference import command
from phalanx.moe.inference.command import positive, report_errors
from phalanx.scripts.output.reader import may_leave


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    return report_errors("serve", lambda: serve(args))


def parser() -> argparse.ArgumentParser:
    p = command.parser("serve", __doc__, SPECIAL)
    add = p.add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: 8000)")
    add("--chat-template", metavar="FILE", help=command.TEMPLATE_HELP)
    add("--batch", type=int, default=16, metavar="N", help="most texts of a request (default: 16)")
    return p


def serve(args: argparse.Namespace) -> None:
    """Serve until it is interrupted; `report_errors` tells errors."""
    positive(context=args.context, batch=args.batch)
    resolve_name(SERVE)(args)


if __name__ == "__main__":
    sys.exit(main())
