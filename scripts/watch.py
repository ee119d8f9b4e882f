#!/usr/bin/env python
"""Follow runs in a browser while they train: losses, norm, speed, experts, tasks, events, ETA.

    python scripts/watch.py runs/NAME [runs/OTHER ...] [--port 8001]
    python scripts/watch.py runs

One page draws metrics.jsonl of a run, finished, live or not begun yet, and follows it. Several runs
lie over each other; of a folder of runs the newest is shown, and others are a click away. It
listens on 127.0.0.1 unless --host says otherwise. Needs `pip install 'phalanx-moe[serve]'`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.tables.programs import WATCH
from phalanx.moe.inference.command import report_errors
from phalanx.parallel.object_store import folder_argument
from phalanx.scripts.output.reader import may_leave


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    return report_errors("watch", lambda: resolve_name(WATCH)(args))


def parser() -> argparse.ArgumentParser:
    p = programs.parser("watch", __doc__)
    add = p.add_argument
    runs = "folders of runs, files metrics.jsonl, or folders with runs in them"
    add("runs", type=folder_argument, nargs="+", metavar="RUN", help=runs)
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8001, metavar="N", help="0 takes a free one (default: 8001)")
    return p


if __name__ == "__main__":
    sys.exit(main())
