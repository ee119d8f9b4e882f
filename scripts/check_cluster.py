"""Check the GPUs and links of a job before it trains, in under a minute, and name what is slow.

    torchrun --nnodes 8 --nproc-per-node 8 --rdzv-id 1 --rdzv-backend c10d \\
        --rdzv-endpoint node0:29500 scripts/check_cluster.py [--json PATH] [--write PATH]
    torchrun --standalone --nproc-per-node 2 scripts/check_cluster.py

Every rank reports its GPU, driver, clocks and what holds them back, the speed of matrix products,
the GPUs that it reaches over NVLink, symmetric memory, and its bandwidth inside the node. Together
they report the bandwidth of an all-reduce, that between pairs of nodes, and how far the clocks of
hosts are apart. One table is printed, then what is below expectation (configs/tables/machines.py),
with ranks and hosts by name. With gloo on CPUs there are no expectations, but a rank that is much
slower than the others is named.

Exit codes of a rank:
   0  fine
   1  something is below expectation
   2  cannot run: ranks are missing (they are named), or devices differ
  45  a rank died or hangs; a message names it, its host and where, within --timeout

Under srun the job ends with the largest of them; torchrun ends with 1 for all but 0.
"""

import argparse
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from phalanx.configs import programs
from phalanx.parallel.fault import launcher
from phalanx.parallel.fault.guard import Guard
from phalanx.parallel.fault.signals import StopSignal

if TYPE_CHECKING:
    from phalanx.scripts.cluster.results import Cluster

_FAULTS = ("slow", "hang")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = programs.parser("check_cluster", __doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write all results; rank 0 does")
    add("--write", type=Path, metavar="PATH", help="write a file for run.machine; rank 0 does")
    add(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for all ranks to come, and for each stage; default: %(default)g",
    )
    add(
        "--network-gbs",
        type=float,
        metavar="GBS",
        help="rate of a GPU's network, 1e9 bytes a second; default: that of the table of machines",
    )
    add("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees a GPU")
    add(
        "--inject",
        metavar="KIND:rankN",
        default="",
        help=f"rehearse a fault of a rank, of {', '.join(_FAULTS)}",
    )
    args = parser.parse_args(argv)
    for option in ("timeout", "network_gbs"):
        value = getattr(args, option)
        if value is not None and value <= 0:
            parser.error(f"--{option.replace('_', '-')} {value:g}: must be greater than 0")
    if args.inject and not re.fullmatch(rf"({'|'.join(_FAULTS)}):rank\d+", args.inject):
        parser.error(
            f"--inject {args.inject}: must be like slow:rank1, with {' or '.join(_FAULTS)}"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with StopSignal(), Guard() as guard:  # before torch is imported
        return _check(args, guard)


def _check(args: argparse.Namespace, guard: Guard) -> int:
    import torch

    from phalanx.parallel.fault.same_settings import compare
    from phalanx.parallel.fault.watchdog import Watchdog
    from phalanx.scripts.cluster.measure import Place, end_groups, measure
    from phalanx.scripts.cluster.meeting import NotMet, Unreachable, leave, meet

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() if args.device is None else args.device == "cuda"
    kind = f"{'cuda' if cuda else 'cpu'}, torch sees {torch.cuda.device_count()} GPUs"
    if cuda and local_rank >= torch.cuda.device_count():
        _emit(f"error: rank {rank} on {socket.gethostname()} has no GPU: device is {kind}")
        return 2
    try:
        store = meet(rank, world, args.timeout)
        if unlike := compare(store, rank, world, {"device": kind}, lambda: {"device": kind}):
            raise NotMet(f"hosts differ: {unlike[0]}")
        folder = Path(tempfile.gettempdir()) / "phalanx_check_cluster"
        watchdog = Watchdog(guard, store, rank, world, args.timeout, folder, _emit)
    except ValueError as error:
        if rank == 0 or (isinstance(error, Unreachable) and local_rank == 0):
            _emit(f"error: {error}")
        return 2
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    kind, _, culprit = args.inject.partition(":rank")
    fault = kind if culprit == str(rank) else ""
    try:
        cluster = measure(Place(rank, world, device), store, args.timeout, fault)
    except Exception as error:
        # A collective that breaks is not this rank's fault.
        own = not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower())
        line = (str(error).splitlines() or [repr(error)])[0]
        if watchdog.report(error, line, own=own):
            _emit(f"error: rank {rank}: {line}")
        return 2
    code = _conclude(args, cluster, shown=rank == 0)
    end_groups()  # while the watchdog sees ranks that die
    watchdog.close()
    leave(store, rank, world)
    return code


def _conclude(args: argparse.Namespace, cluster: "Cluster", *, shown: bool) -> int:
    """Judge the results, which all ranks have, show them on one, and return the exit code."""
    from phalanx.scripts.cluster import table
    from phalanx.scripts.cluster.findings import expected_of, findings
    from phalanx.scripts.cluster.machine_file import machine_file

    expected = expected_of(cluster, args.network_gbs)
    found = findings(cluster, expected)
    if shown:
        print(table.text(cluster, expected, found), flush=True)
    if shown and args.json is not None:
        values = table.values(cluster, expected, found)
        if not _written("--json", args.json, json.dumps(values, indent=1) + "\n"):
            return 2
    if shown and args.write is not None:
        try:
            text = machine_file(cluster)
        except ValueError as error:
            _emit(f"error: --write: {error}; write `kind:` and what the table says by hand")
            return 2
        if not _written("--write", args.write, text):
            return 2
    return table.exit_code(found)


def _written(option: str, path: Path, text: str) -> bool:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _emit(f"error: {option}: cannot write {path}: {error.strerror}")
        return False
    return True


def _emit(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    launcher.tell(text)


if __name__ == "__main__":
    sys.exit(main())
