"""Programs whose reader has enough, as `| head -1` has."""

import os
import subprocess
import sys
from pathlib import Path

from phalanx.scripts import plot_run
from phalanx.scripts.output.reader import may_leave

PROGRAM = """
import sys
from phalanx.scripts.output.reader import may_leave

@may_leave
def main() -> int:
    for number in range(100_000):
        print("line", number)
    print("done", file=sys.stderr)
    return 3

sys.exit(main())
"""


def test_work_is_done_to_its_end_when_nobody_reads() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"line 0\n"
        process.stdout.close()
        output = process.stderr.read()
    assert (process.returncode, output) == (3, b"done\n")


def test_a_short_output_that_is_still_buffered(capfd) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        before, sys.stdout = sys.stdout, stream

        @may_leave
        def main() -> int:
            print("never read")
            return 0

        try:
            assert main() == 0 and sys.stdout is stream
        finally:
            sys.stdout = before


def test_no_other_file_is_blamed(tmp_path: Path, figures: list) -> None:
    """The picture of a run is drawn, whoever reads what is said of it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as stream:
        before, sys.stdout = sys.stdout, stream
        try:
            assert plot_run.main([str(tmp_path)]) == 0
        finally:
            sys.stdout = before
    assert (tmp_path / "curves.png").exists() and len(figures) == 1
