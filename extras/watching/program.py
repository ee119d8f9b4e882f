"""From the command line to a server that listens."""

import argparse
import sys

from phalanx.extras.serving.local import listening, needing_packages, run


def watch(args: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM. Errors are those of `report_errors`."""
    with needing_packages():
        from phalanx.extras.watching.app import app
    from phalanx.extras.watching.runs import Runs

    runs = Runs(args.runs)
    with listening(args.host, args.port) as (listener, address):
        for folder in runs.missing():
            print(f"-- {folder} does not exist yet", file=sys.stderr)
        print(f"-- {', '.join(map(str, args.runs))}; {address}", file=sys.stderr, flush=True)
        run(app(runs, args.host), listener)
