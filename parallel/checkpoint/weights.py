"""The weights of a checkpoint alone, for a model that is looked at and not trained.

Nothing is written, neither beside the checkpoint nor in its run. The layout that wrote it need not
be that of the model.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from phalanx.parallel.checkpoint import commit, remote_reader, safe_pickle, saved_config
from phalanx.parallel.checkpoint.model_state import check_fit, restore, sharded_state
from phalanx.parallel.checkpoint.saved_config import NoUsableCheckpoint
from phalanx.parallel.checkpoint.writer import without_output
from phalanx.parallel.object_store import Place, Remote


def read_state(path: Place, state: dict[str, Any]) -> dict[str, Any]:
    """Sharded `state` with the values of the checkpoint at `path`, whose files are verified.

    Raises:
        CheckpointException, CheckpointingException, commit.Invalid, OSError: it cannot be read.
    """
    local = remote_reader.reading(path) if isinstance(path, Remote) else nullcontext(path)
    with without_output(), safe_pickle.plain_objects_only(), local as folder:
        return dict(dist_checkpointing.load(state, str(folder), validate_access_integrity=False))


def verify(path: Place, read: Callable[[int], object] | None = None) -> commit.Commit:
    """COMMIT.json of a checkpoint, all of whose files have their checksums.

    Args:
        path: of the checkpoint.
        read: told the bytes of each file once it has been read; None compares sizes alone.

    Raises:
        NoUsableCheckpoint: it is damaged, or no checkpoint.
    """
    problem = saved_config.lacking(path)
    if not problem and read is not None:
        problem = "; ".join(commit.verify(path, commit.read_commit(path).files, read)[:3])
    if problem:
        raise NoUsableCheckpoint(f"{path} is no valid checkpoint: {problem}; choose another --step")
    return commit.read_commit(path)


def read_common(path: Place, record: commit.Commit) -> dict[str, Any]:
    """Read the objects of a checkpoint that are not tensors: configuration, step, data cursor.

    Raises:
        NoUsableCheckpoint: it cannot be read.
    """
    try:
        metadata = safe_pickle.read_metadata(path, record.files)
        return dict(safe_pickle.read_common(path, metadata)["common"])
    except (commit.Invalid, TypeError, KeyError) as error:
        raise NoUsableCheckpoint(f"{path} cannot be read: {error}") from None


def load_weights(
    path: Place, record: commit.Commit, model: Sequence[torch.nn.Module], dp_cp_group: Any
) -> None:
    """Put the weights of a verified checkpoint into model chunks; all ranks together.

    Raises:
        CheckpointMismatch: it is of another model.
        NoUsableCheckpoint: it cannot be read.
    """
    try:
        state = sharded_state(model, dp_cp_group)
        check_fit(state, safe_pickle.read_metadata(path, record.files), path)
        restore(model, read_state(path, state))
    except (CheckpointException, CheckpointingException, commit.Invalid, OSError) as problem:
        raise NoUsableCheckpoint(f"{path} cannot be read: {safe_pickle.reason(problem)}") from None
