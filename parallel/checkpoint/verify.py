"""Which checkpoint may be loaded: all ranks verify it together and come to the same answer.

Each reads a share of the files. What is damaged, or could run code, is told by name; in the run's
own folder it is also renamed, so that it is never tried again.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist

from phalanx.configs.knobs import overrides
from phalanx.parallel.checkpoint import commit, safe_pickle
from phalanx.parallel.checkpoint.saved_config import (
    CheckpointError,
    lacking,
    none_valid,
    not_valid,
)
from phalanx.parallel.fault.agreement import Failed, failing_together, gather, on_main
from phalanx.parallel.object_store import Place, Remote

log = logging.getLogger(__name__)


def newest(root: Place) -> tuple[Place, commit.Commit] | None:
    """Newest valid checkpoint of a run, or None if it has none yet.

    Folders found to be invalid on the way are renamed to *.bad.

    Raises:
        NoUsableCheckpoint: the run has checkpoints and none is valid.
        CheckpointError: the folder cannot be read.
    """
    with report_errors(f"cannot read {root}"):
        on_main(lambda: commit.recover(root))
        found = on_main(lambda: [path for _, path in commit.committed(root)])
        refused = on_main(lambda: commit.with_suffix(root, ".bad"))
        incomplete = on_main(lambda: commit.with_suffix(root, ".tmp"))
        earlier = on_main(lambda: commit.with_suffix(root, ".old"))
    for folder in incomplete:
        warn(f"{folder} was never completed: ignored")
    for folder in found:
        record, problems = _verify(folder)
        if record is not None and not problems:
            return folder, record
        problem = f"{folder} is not valid: {'; '.join(problems[:3])}"
        with report_errors(f"{problem}. It cannot be renamed"):
            refused.append(on_main(partial(commit.set_aside, folder, ".bad")))
        warn(f"{problem}. {set_aside_message(refused[-1], 'bad').capitalize()}")
    if refused:
        raise none_valid(root, refused)
    for folder in earlier:
        continues = overrides({"run.resume": str(folder)})
        warn(f"{folder} is of an earlier run: ignored ({continues} continues it)")
    return None


def verified(path: Place) -> commit.Commit:
    """COMMIT.json of a checkpoint that a person named, or NoUsableCheckpoint; it stays as it is."""
    record, problems = _verify(path)
    if record is None or problems:
        raise not_valid(path, problems[0])
    return record


def set_aside_message(folder: Place, why: str) -> str:
    """How it is known of a checkpoint that was set aside."""
    return f"renamed to {folder.name}" if isinstance(folder, Path) else f"marked as {why}"


@contextmanager
def report_errors(what: str, kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Say `what` could not be done when the ranks agree that one failed."""
    try:
        yield
    except Failed as error:
        raise kind(f"{what}: {error}") from None


def warn(text: str) -> None:
    """Log a warning on one rank."""
    if dist.get_rank() == 0:
        log.warning(text)


def _verify(folder: Place) -> tuple[commit.Commit | None, list[str]]:
    """(COMMIT.json, what is wrong with the folder); each rank reads a share of the files."""
    with report_errors(f"cannot read {folder}"):
        record, problem = on_main(lambda: _commit_of(folder))
        if record is None:
            return None, [problem]
        with failing_together(OSError):  # which says nothing about the checkpoint
            mine = commit.share(record.files, dist.get_rank(), dist.get_world_size())
            problems = commit.verify(folder, mine)
        problems = [line for lines in gather(problems) for line in lines]
        return record, problems or on_main(lambda: _unsafe(folder, record))


def _commit_of(folder: Place) -> tuple[commit.Commit | None, str]:
    if not folder.is_dir():
        return None, "no such folder"
    try:
        record = commit.read_commit(folder)
        if isinstance(folder, Remote) and (problem := lacking(folder)):
            return None, problem
        return record, ""
    except commit.Invalid as error:
        return None, str(error)


def _unsafe(folder: Place, record: commit.Commit) -> list[str]:
    try:
        safe_pickle.read_common(folder, safe_pickle.read_metadata(folder, record.files))
    except commit.Invalid as error:
        return [str(error)]
    return []
