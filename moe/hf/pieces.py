"""A checkpoint of Megatron-Core's torch_dist format, written and read in pieces by one process.

The format stores pieces of tensors as concatenated torch.save archives in .distcp files, and their
offsets in `.metadata`, which parallel.checkpoint.safe_pickle reads.
"""

import io
import json
import math
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from phalanx.moe.hf import ConversionError
from phalanx.parallel.checkpoint import commit, remote, safe_pickle  # noqa: F401  (addresses)
from phalanx.parallel.object_store import Place
from phalanx.parallel.untrusted import check_archive

Shape = tuple[int, ...]
_FILE = 4 << 30  # bytes after which a new file starts: the ranks of a run verify files in parallel


class PieceWriter:
    """A new checkpoint of step 0 in an empty folder, which `commit` renames."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sums: commit.Sums = {}
        self._file: BinaryIO | None = None
        self._name, self._size, self._crc = "", 0, 0
        self._tensors: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def add(self, key: str, shape: Shape, first: int, values: Tensor) -> None:
        """Add rows of the tensor `key` of `shape` from row `first`; all rows have one dtype."""
        offsets = torch.Size([first, *[0] * (len(shape) - 1)])
        if key not in self._tensors:
            properties = TensorProperties(dtype=values.dtype)
            self._tensors[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
        chunks = self._tensors[key].chunks
        index = MetadataIndex(key, offsets, len(chunks))
        chunks.append(ChunkStorageMetadata(offsets, values.shape))
        self._append(index, values)

    def commit(self, final: Path, common: dict[str, Any]) -> None:
        """Finish the checkpoint and rename it to `final`; `common` is plain data for all ranks."""
        name = "common_state/shard_0_1"
        self._append(MetadataIndex(name), [{"common": common}])
        self._end()
        metadata = Metadata(
            {**self._tensors, name: BytesStorageMetadata()},
            storage_data=self._places,
            storage_meta=StorageMeta(),
        )
        (self._folder / commit.METADATA).write_bytes(pickle.dumps(metadata))
        facts = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (self._folder / "metadata.json").write_text(json.dumps(facts))
        for name in (commit.METADATA, "metadata.json"):
            self._sums[name] = commit.checksum(self._folder / name)
        commit.commit(self._folder, final, commit.Commit(0, 1, self._sums))

    def _append(self, index: MetadataIndex, value: Any) -> None:
        buffer = io.BytesIO()  # torch corrupts memory when writing to disk fails inside torch.save
        torch.save(value, buffer)
        data = buffer.getbuffer()
        if self._file is None or self._size + data.nbytes > _FILE:
            self._end()
            self._name = f"__0_{len(self._sums)}.distcp"
            self._file, self._size, self._crc = (self._folder / self._name).open("wb"), 0, 0
        self._file.write(data)
        self._places[index] = _StorageInfo(self._name, self._size, data.nbytes)
        self._size, self._crc = self._size + data.nbytes, zlib.crc32(data, self._crc)

    def _end(self) -> None:
        if self._file is not None:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
            self._sums[self._name] = (self._size, self._crc)


@dataclass(frozen=True)
class _Piece:
    offsets: Shape
    sizes: Shape
    place: _StorageInfo


class PieceReader:
    """The tensors of a checkpoint of any layout, at a folder or an address.

    All files are verified; `progress` is called with (bytes read, bytes of all files).

    Raises:
        ConversionError: it is damaged, or no checkpoint.
    """

    def __init__(self, folder: Place, progress: Callable[[int, int], object]) -> None:
        try:
            files = commit.read_commit(folder).files
            total = sum(size for size, _ in files.values())
            if problems := commit.verify(folder, files, lambda n: progress(n, total)):
                raise commit.Invalid(problems[0])
            metadata = safe_pickle.read_metadata(folder, files)
            self.common: dict[str, Any] = safe_pickle.read_common(folder, metadata)["common"]
        except commit.Invalid as error:
            raise ConversionError(f"{folder} is no valid checkpoint: {error}") from None
        self._folder, self._files = folder, files
        self._data_offsets: dict[tuple[str, Shape], int | None] = {}
        self._described: dict[str, Any] = metadata.state_dict_metadata
        self._pieces: dict[str, list[_Piece]] = {}
        for index, place in metadata.storage_data.items():
            described = self._described.get(index.fqn)
            if isinstance(described, TensorStorageMetadata):
                sizes = {tuple(c.offsets): tuple(c.sizes) for c in described.chunks}
                offsets = tuple(index.offset or ())
                if offsets not in sizes:
                    raise ConversionError(f"{folder} does not describe a piece of {index.fqn}")
                piece = _Piece(offsets, sizes[offsets], place)
                self._pieces.setdefault(index.fqn, []).append(piece)

    def keys(self) -> set[str]:
        """Names of the tensors, those of the optimizer included."""
        return set(self._pieces)

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._described[key].properties.dtype

    def shape(self, key: str) -> Shape:
        """Global shape of a tensor."""
        return tuple(self._described[key].size)

    def read(self, key: str, rows: tuple[int, int]) -> Tensor:
        """Rows of a tensor, joined from the pieces that hold them; else a ConversionError."""
        start, stop = rows
        out = torch.empty((stop - start, *self.shape(key)[1:]), dtype=self.dtype(key))
        filled = 0
        for piece in self._pieces[key]:
            low = max(start, piece.offsets[0])
            high = min(stop, piece.offsets[0] + piece.sizes[0])
            if low < high:
                rest = zip(piece.offsets[1:], piece.sizes[1:], strict=True)
                place = (slice(low - start, high - start), *(slice(o, o + n) for o, n in rest))
                values = self._rows(key, piece, low - piece.offsets[0], high - piece.offsets[0])
                out[place] = values
                filled += values.numel()
        if filled != out.numel():
            raise ConversionError(f"{self._folder} holds only a part of {key}")
        return out

    def _rows(self, key: str, piece: _Piece, start: int, stop: int) -> Tensor:
        """Rows of one piece; only these are read, unless it was saved with strides."""
        name, size = piece.place.relative_path, self._files[piece.place.relative_path][0]
        with commit.open_checked(self._folder / name, size) as file:
            place, stream = piece.place, cast(io.IOBase, file)
            archive: Any = _create_file_view(stream, place.offset, place.length)
            if (key, piece.offsets) not in self._data_offsets:  # an export reads rows many times
                self._data_offsets[key, piece.offsets] = self._data_of(key, piece, archive)
            at = self._data_offsets[key, piece.offsets]
            archive.seek(0)
            if at is None:
                return self._whole(key, archive.read(place.length))[start:stop]
            dtype = self.dtype(key)
            row = math.prod(piece.sizes[1:]) * dtype.itemsize
            data = torch.empty((stop - start) * row, dtype=torch.uint8)
            archive.seek(at + start * row)
            if archive.readinto(data.numpy()) != data.numel():
                raise ConversionError(f"{self._folder} ends within {key}")
        return data.view(dtype).view(stop - start, *piece.sizes[1:])

    def _whole(self, key: str, data: bytes) -> Tensor:
        try:
            check_archive(data).close()
        except (ValueError, zipfile.BadZipFile) as error:
            raise ConversionError(f"{self._folder} has {key} in another form: {error}") from None
        return torch.load(io.BytesIO(data), weights_only=True)  # type: ignore[no-any-return]

    def _data_of(self, key: str, piece: _Piece, archive: Any) -> int | None:
        """Offset of the values of a piece in its archive; None if they are not contiguous."""
        # On the meta device torch.load reads no data, but sets the offset in the archive.
        meta = torch.load(archive, map_location="meta", weights_only=True)
        if tuple(meta.shape) != piece.sizes or meta.dtype != self.dtype(key):
            raise ConversionError(f"{self._folder} does not describe {key} as it is stored")
        if not meta.is_contiguous():
            return None
        start: int = meta.untyped_storage()._checkpoint_offset
        return start + meta.storage_offset() * meta.itemsize
