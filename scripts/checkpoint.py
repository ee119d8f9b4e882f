#!/usr/bin/env python
"""Look at the checkpoints of a run, or average them: which there are, whether one is sound.

Needs neither a GPU nor torchrun, changes no checkpoint, and runs no code from one.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.moe.report.progress import progress
from phalanx.parallel.checkpoint import commit, saved_config
from phalanx.parallel.checkpoint.commit import Commit, Invalid, NewerFormat
from phalanx.parallel.checkpoint.saved_config import CheckpointError
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch, leaves, unknown
from phalanx.parallel.object_store import Place, argument, folder_argument
from phalanx.scripts.output.reader import may_leave

SET_ASIDE = {
    ".bad": "failed verification",
    ".old": "of an earlier run",
    ".tmp": "never completed",
    ".new": "complete: gets its name when the run goes on",
}


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 sound, 1 damaged or unreadable, 2 wrong usage."""
    args = parser().parse_args(argv)
    try:
        for line in args.show(args):
            # Escape sequences from the file must not reach the terminal.
            print(line if line.isprintable() else ascii(line))
    except (Invalid, NewerFormat, OSError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        where = args.out if "out" in args else args.folder
        print(f"checkpoint: {where}: {reason}", file=sys.stderr)
        return 1
    except (CheckpointError, CheckpointMismatch, ValueError) as error:
        print(f"checkpoint: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    top = programs.parser("checkpoint", (__doc__ or "").splitlines()[0])
    commands = top.add_subparsers(required=True, metavar="list | verify | inspect | average")
    one = "of a checkpoint, or of a run: "
    for show, help_text, folder in (
        (list_run, "steps, sizes and ages; reads names and sizes of files only", "of a run"),
        (verify, "read every file and compare it with its checksum", f"{one}all that it has"),
        (inspect, "tensors, shapes, types, and the configuration", f"{one}its newest"),
    ):
        command = commands.add_parser(
            show.__name__.split("_")[0], help=help_text, description=help_text
        )
        command.add_argument("folder", type=argument, help=f"folder or address {folder}")
        command.set_defaults(show=lambda args, show=show: show(args.folder))
    text = "the mean of weights, as a checkpoint that a run can start from"
    command = commands.add_parser("average", help=text, description=text)
    command.add_argument(
        "folders",
        nargs="+",
        type=argument,
        metavar="folder",
        help="folder or address of a checkpoint, or of a run: its newest",
    )
    command.add_argument("--out", required=True, type=folder_argument, help="must not exist")
    command.add_argument("--ema", action="store_true", help="of the moving averages of optim.ema")
    command.set_defaults(show=average)
    return top


def average(args: argparse.Namespace) -> Iterator[str]:
    """Write the mean of checkpoints; a line, and one on expert biases if there are any."""
    from phalanx.moe.hf.average import average as write_average  # takes seconds

    paths = [saved_config.checkpoint_of(folder) for folder in args.folders]
    with progress("averaging", unit=" tensors") as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done)

        biases = write_average(paths, args.out, averages=args.ema, progress=advance)
    of = "moving averages" if args.ema else "weights"
    yield f"{args.out}: {of} of {', '.join(map(str, paths))}"
    if biases:
        layers = pluralize(biases, "layer")
        held = "that of the checkpoint" if len(paths) == 1 else "the mean of the checkpoints'"
        without = ", which has no moving average," if args.ema else ""
        yield f"  the bias of the experts ({layers}){without} is {held}"


def list_run(folder: Place) -> Iterator[str]:
    """One line per checkpoint of a run, newest first; incomplete and set-aside ones at the end."""
    root = saved_config.root_of(folder)
    complete = [path for _, path in commit.committed(root)]
    set_aside = [
        (path, why) for end, why in SET_ASIDE.items() for path in commit.with_suffix(root, end)
    ]
    if not complete and not set_aside:
        if isinstance(folder, Path):
            folder.stat()
        raise Invalid("no checkpoints " + ("here" if isinstance(root, Path) else f"in {root}"))
    for path in complete:
        yield _line(path, _quick(path))
    for path, why in set_aside:
        yield _line(path, why)


def verify(folder: Place) -> Iterator[str]:
    """Read all files of one checkpoint or of all checkpoints of a run.

    Raises Invalid if files differ from their checksums, after all have been read.
    """
    paths = _meant(folder)
    problems = []
    for path in paths:
        try:
            yield _verified(path)
        except Invalid as error:
            problems.append(f"{path.name}: {error}" if len(paths) > 1 else str(error))
    if problems:
        raise Invalid("; ".join(problems))


def _verified(folder: Place) -> str:
    record = commit.read_commit(folder)
    total = sum(size for size, _ in record.files.values())
    with progress("verifying", total=total, unit="B", unit_scale=True) as bar:
        problems = commit.verify(folder, record.files, bar.update)
    if problems:
        raise Invalid("; ".join(problems))
    _contents(folder, record)
    files = pluralize(len(record.files), "file")
    return f"{folder}: step {record.step}, {files}, {_size(total)}: sound"


def inspect(folder: Place) -> Iterator[str]:
    """Contents of a checkpoint, or of a run's newest. Checksums are not compared: see `verify`."""
    folder = _meant(folder)[0]
    record = commit.read_commit(folder)
    tensors, state = _contents(folder, record)
    common = state["common"]
    yield f"step {record.step}, written by {pluralize(record.world, 'rank')}"
    for name, (size, _) in sorted(record.files.items()):
        yield f"  {name}  {_size(size)}"
    yield "configuration"
    unknown_knobs = unknown(common.get("config", {}))
    for key, value in leaves(common.get("config", {})):
        yield f"  {key}={value}" + (
            ", which this version does not know" if key in unknown_knobs else ""
        )
    yield "data " + json.dumps(common.get("data", {}))
    count = sum(shape.numel() for name, shape, _ in tensors if not name.startswith("optimizer."))
    yield f"tensors ({pluralize(f'{count:,}', 'number')} besides the optimizer's)"
    width = max((len(name) for name, *_ in tensors), default=0)
    for name, shape, dtype in tensors:
        yield f"  {name:<{width}}  {str(dtype).removeprefix('torch.'):<8}  {list(shape)}"


def _meant(folder: Place) -> list[Place]:
    """Checkpoints of a run, newest first, or the folder itself if it is a checkpoint."""
    if not folder.is_dir():
        raise Invalid("no such folder")
    if (folder / commit.COMMIT).is_file():
        return [folder]
    if hint := saved_config.of_hugging_face(folder):
        raise Invalid(hint)
    root = saved_config.root_of(folder)
    found = [path for _, path in commit.committed(root)]
    if not found and root != folder:
        raise Invalid("no complete checkpoint here: `list` shows what is set aside")
    return found or [folder]


def _contents(folder: Place, record: Commit) -> tuple[list[tuple[str, Any, Any]], dict[str, Any]]:
    """([(name, shape, dtype)], common state), read without running code from the files."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # takes seconds

    from phalanx.parallel.checkpoint import safe_pickle

    metadata = safe_pickle.read_metadata(folder, record.files)
    held = sorted(metadata.state_dict_metadata.items())
    tensors = [
        (k, v.size, v.properties.dtype) for k, v in held if isinstance(v, TensorStorageMetadata)
    ]
    return tensors, safe_pickle.read_common(folder, metadata)


def _quick(folder: Place) -> str:
    """State of a checkpoint, judged by names and sizes of its files alone."""
    try:
        problem = saved_config.lacking(folder)
    except NewerFormat as error:
        return str(error)
    return f"damaged: {problem}" if problem else f"complete{_phase(folder)}"


def _phase(folder: Place) -> str:
    """`, phase long` for a checkpoint of a phase, also if it is the last one of it."""
    try:
        known = saved_config.configuration(folder)
        phase, steps = known.config["run"]["phases"][-1], known.config["run"]["steps"]
        return f", {'the end of' if known.step == steps else 'in'} phase {phase['name']}"
    except (Invalid, OSError, LookupError, TypeError):
        return ""  # no phases, or `verify` tells


def _line(folder: Place, state: str) -> str:
    held, newest = commit.total_bytes(folder)
    return f"{folder.name:<20}  {_size(held):>10}  {_age(time.time() - newest):>8} ago  {state}"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.{0 if unit == 'bytes' else 1}f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"


if __name__ == "__main__":
    sys.exit(main())
