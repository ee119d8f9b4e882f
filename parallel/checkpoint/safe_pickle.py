"""Content of a checkpoint, read without running code from its files.

torch_dist describes a checkpoint in `.metadata`, a pickle, and keeps plain objects (configuration,
random states) as pickles between the tensors; torch unpickles both without restraint. Here the
first may only build the classes that describe tensors, and the second, as tensors, only what
`torch.load(weights_only=True)` allows. Neither may ask for more memory than it has bytes
(parallel.untrusted).
"""

import io
import os
import pickle
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from phalanx.parallel.checkpoint import commit
from phalanx.parallel.checkpoint.commit import METADATA, Invalid
from phalanx.parallel.object_store import Place
from phalanx.parallel.untrusted import check_archive, check_pickle

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    _METADATA: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {n for n, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


def read_metadata(folder: Place, files: Collection[str]) -> Metadata:
    """`.metadata` of a checkpoint: names, shapes and places of what it holds.

    Raises:
        Invalid: it is damaged, asks for anything but a description of tensors, or refers to a file
            that is not one of `files`.
        OSError: it cannot be read.
    """
    data = commit.contents(folder / METADATA)
    try:
        check_pickle(data)
        metadata = _Unpickler(io.BytesIO(data)).load()
        _check(metadata, files)
    except Invalid:
        raise
    except Exception as error:  # pickle lets through whatever the bytes make it stumble over
        raise Invalid(f"{METADATA} is not readable ({type(error).__name__})") from None
    return metadata


def read_object(
    folder: Place, metadata: Metadata, key: str, shard: int = 0, shards: int = 1
) -> Any:
    """A plain object of a checkpoint: "common_state", or a rank's shard of "rng".

    Raises:
        Invalid: it is not there, or is more than plain data.
        OSError: the file cannot be read.
    """
    name = f"{key}/shard_{shard}_{shards}"
    place = metadata.storage_data.get(MetadataIndex(name))
    if place is None:
        raise Invalid(f"{METADATA} does not name {name}")
    if place.length > commit.LARGEST:
        raise Invalid(f"{place.relative_path}: {name} is larger than any plain data")
    data = commit.contents(folder / place.relative_path, place.offset, place.length)
    try:
        check_archive(data).close()
        loaded = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        problem = reason(error)
        raise Invalid(f"{place.relative_path}: {name} is not plain data ({problem})") from None
    if not isinstance(loaded, list) or len(loaded) != 1:  # how Megatron-Core wraps an object
        raise Invalid(f"{place.relative_path}: {name} is not what Megatron-Core writes")
    return loaded[0]


def read_common(folder: Place, metadata: Metadata) -> dict[str, Any]:
    """Read the objects that all ranks share: configuration, step, data cursor, step counts.

    Raises as `read_object`.
    """
    state = read_object(folder, metadata, "common_state")
    if not isinstance(state, dict) or not isinstance(state.get("common"), dict):
        raise Invalid("common_state has no configuration")
    return state


@contextmanager
def plain_objects_only() -> Iterator[None]:
    """Inside, torch's own reader, which asks `torch.load` for everything, takes plain objects."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def reason(error: BaseException) -> str:
    """One line on why torch could not read something, without its advice to allow everything."""
    if refused := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"asks for {refused[1]}: refused, it could run code"
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = [line for line in str(error).splitlines() if line and "weights_only" not in line]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            asked = ascii(f"{module}.{name}"[:80])[1:-1]  # one line, whatever the file says
            raise Invalid(f"{METADATA} asks for {asked}: refused, it could run code")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise Invalid(f"{METADATA} refers to an object outside of it: refused")


def _check(metadata: Any, files: Collection[str]) -> None:
    held = getattr(metadata, "state_dict_metadata", None)
    places = getattr(metadata, "storage_data", None)
    if not (isinstance(metadata, Metadata) and isinstance(held, dict) and isinstance(places, dict)):
        raise Invalid(f"{METADATA} describes no checkpoint")
    for key, what in held.items():
        sound = isinstance(what, BytesStorageMetadata) or (
            isinstance(what, TensorStorageMetadata)
            and isinstance(getattr(what, "size", None), torch.Size)
            and isinstance(getattr(getattr(what, "properties", None), "dtype", None), torch.dtype)
        )
        if not (isinstance(key, str) and sound):
            raise Invalid(f"{METADATA} does not describe {str(key)[:80]!r}")
    for index, place in places.items():
        if not (isinstance(index, MetadataIndex) and isinstance(place, _StorageInfo)):
            raise Invalid(f"{METADATA} does not tell where its tensors are")
        if place.relative_path not in files:
            name = str(place.relative_path)[:80]
            raise Invalid(f"{METADATA} refers to {name!r}, which is no file of this checkpoint")
        if not all(type(n) is int and n >= 0 for n in (place.offset, place.length)):
            raise Invalid(f"{METADATA} does not tell where its tensors are")
