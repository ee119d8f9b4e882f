"""The weights of a checkpoint alone, for a model that is looked at and not trained.

Nothing is written, neither beside the checkpoint nor in its run. The layout that wrote it may be
another one. Of shards in an object store, a rank reads the ranges that it needs, some ahead: the
latency of the store is waited for once and not for every tensor.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from phalanx.parallel.checkpoint import commit, remote, safe_pickle, saved_config
from phalanx.parallel.checkpoint.model_state import check_fit, restore, sharded_state
from phalanx.parallel.checkpoint.saved_config import NoUsableCheckpoint
from phalanx.parallel.checkpoint.writer import without_output
from phalanx.parallel.megatron.patches import shards_from
from phalanx.parallel.object_store import Place, Remote, in_order


def read_state(path: Place, state: dict[str, Any]) -> dict[str, Any]:
    """Sharded `state` with the values of the checkpoint at `path`, whose files are verified.

    Raises:
        CheckpointException, CheckpointingException, commit.Invalid, OSError: it cannot be read.
    """
    local = reading(path) if isinstance(path, Remote) else nullcontext(path)
    with without_output(), safe_pickle.plain_objects_only(), local as folder:
        return dict(dist_checkpointing.load(state, str(folder), validate_access_integrity=False))


def verify(path: Place, read: Callable[[int], object] | None = None) -> commit.Commit:
    """COMMIT.json of a checkpoint, all of whose files have their checksums.

    `read` is told the bytes of each file once it has been read; None compares sizes alone. Raises
    NoUsableCheckpoint.
    """
    problem = saved_config.lacking(path)
    if not problem and read is not None:
        problem = "; ".join(commit.verify(path, commit.read_commit(path).files, read)[:3])
    if problem:
        raise NoUsableCheckpoint(f"{path} is no valid checkpoint: {problem}; choose another --step")
    return commit.read_commit(path)


def read_common(path: Place, record: commit.Commit) -> dict[str, Any]:
    """Read the objects of a checkpoint that are not tensors, or raise NoUsableCheckpoint."""
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


@contextmanager
def reading(folder: Remote) -> Iterator[Path]:
    """The local folder that stands for a checkpoint; Megatron-Core loads it as any other.

    Raises Invalid if the metadata is not what was committed, OSError if it cannot be read.
    """
    files = commit.read_commit(folder).files
    sizes = {name: size for name, (size, _) in files.items()}
    with (
        remote.metadata_of(folder, files) as local,
        shards_from(lambda p: _Reader(p, folder, sizes)),
    ):
        yield local


class _Reader(FileSystemReader):
    """Reads metadata from `local` and shards from `folder`, whose files have these `sizes`."""

    def __init__(self, local: Path, folder: Remote, sizes: dict[str, int]) -> None:
        super().__init__(local)
        self.fs = _Names()
        self._folder, self._sizes = folder, sizes
        self._ahead: Iterator[bytes] = iter(())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read file by file as torch does, and within each file in the order of the plan."""
        by_file: dict[str, list[_StorageInfo]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            by_file.setdefault(info.relative_path, []).append(info)
        places = [info for infos in by_file.values() for info in infos]
        with in_order(self._fetch, places, lambda info: int(info.length)) as self._ahead:
            return super().read_data(plan, planner)

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        return io.BytesIO(next(self._ahead))

    def _fetch(self, info: _StorageInfo) -> bytes:
        if info.offset + info.length > self._sizes[info.relative_path]:
            raise commit.Invalid(f"{info.relative_path} ends before what is read of it")
        data = commit.contents(self._folder / info.relative_path, info.offset, info.length)
        if len(data) != info.length:
            raise commit.Invalid(f"{info.relative_path} has become shorter")
        return bytes(data)


class _Names(FileSystem):
    """Opens metadata, and of a shard only its name: `_Reader` has its ranges."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if str(path).endswith(".distcp"):
            yield None
        else:
            with super().create_stream(path, mode) as stream:
                yield stream
