"""Writes a Hugging Face folder: safetensors shards of bounded size, filled piece by piece.

The safetensors library writes a shard from tensors that are all in memory. This module writes
headers first, from names, dtypes and shapes, and then data in any order.
Format: https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data).
"""

import json
import math
import os
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.source import INDEX, all_finite

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


class Shards:
    """New shards in `folder`, and their index.

    Args:
        folder: empty.
        tensors: name -> (dtype, shape), in the order in which they are stored.
        limit: bytes of data in a shard; a larger tensor has a separate one.
    """

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]],
        limit: int,
    ) -> None:
        self._folder, self._tensors = folder, tensors
        self._open: tuple[str, BinaryIO] | None = None
        self._place: dict[str, tuple[str, int]] = {}
        shards: list[dict[str, int]] = [{}]
        filled = self.bytes = 0
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * dtype.itemsize
            if filled and filled + size > limit:
                shards.append({})
                filled = 0
            shards[-1][name] = filled
            filled += size
            self.bytes += size
        for number, shard in enumerate(shards, 1):
            self._lay_out(f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard)

    def _lay_out(self, file: str, shard: dict[str, int]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, start in shard.items():
            dtype, shape = self._tensors[name]
            end = start + math.prod(shape) * dtype.itemsize
            offsets = [start, end]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (self._folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        for name, start in shard.items():
            self._place[name] = (file, 8 + len(text) + start)

    def write(self, name: str, first: int, values: Tensor) -> int:
        """Write rows of a tensor from row `first`; returns their bytes. Each row is written once.

        Raises:
            ConversionError: a value is NaN or infinite in the dtype of the shard.
        """
        dtype, shape = self._tensors[name]
        values = values.to(dtype)
        if not all_finite(values):
            raise ConversionError(
                f"{name} has values that are NaN or infinite in {_NAMES[dtype]}: export an earlier "
                "checkpoint"
            )
        file, start = self._place[name]
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, (self._folder / file).open("r+b"))
        data = values.contiguous().view(-1).view(torch.uint8).numpy()
        self._open[1].seek(start + first * math.prod(shape[1:]) * dtype.itemsize)
        self._open[1].write(data)
        return data.nbytes

    def close(self) -> None:
        """Flush the open shard to disk and close it."""
        if self._open is not None:
            with self._open[1] as stream:
                stream.flush()
                os.fsync(stream.fileno())
        self._open = None

    def index(self) -> None:
        """Write the index, after all data."""
        self.close()
        files = {name: file for name, (file, _) in self._place.items()}
        text = json.dumps({"metadata": {"total_size": self.bytes}, "weight_map": files}, indent=2)
        (self._folder / INDEX).write_text(text + "\n")
