"""Loads a checkpoint from an object store: of the shards, a rank reads the ranges that it needs.

Between Megatron-Core, which asks for tensors of any layout, and `parallel.checkpoint.remote`.
Metadata lies in a local folder meanwhile. Some ranges are read ahead, so that the latency of the
store is waited for once and not for every tensor.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from phalanx.parallel.checkpoint import commit, remote
from phalanx.parallel.megatron.patches import shards_from
from phalanx.parallel.object_store import Remote, in_order


@contextmanager
def reading(folder: Remote) -> Iterator[Path]:
    """The local folder that stands for a checkpoint; Megatron-Core loads it inside as any other.

    Raises:
        Invalid: a file of the metadata is not what was committed.
        OSError: it cannot be read.
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
