"""Tensors of a Hugging Face folder, read in pieces: safetensors only, quantized ones as bf16.

The folder is untrusted. Shards are named by the index and lie directly in the folder; their headers
are checked by the safetensors library; pickled weights are never opened. A folder that two readers
could interpret as different models is refused.

Dequantized are MXFP4 of GPT-OSS and block-scaled FP8 of DeepSeek-V3: products are exact in fp32 and
rounded to bf16 once. MXFP4 follows the OCP Microscaling Formats specification 1.0: 32 E2M1 values
share one E8M0 scale, of which 255 is NaN.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.moe.data.tokenizer.special_tokens import read_object
from phalanx.moe.hf import ConversionError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_MAPPED = 64 << 20  # bytes read of a shard before its mapping, which counts as memory, is renewed
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_BLOCK = (128, 128)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a folder; a ConversionError if it is missing or no object."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing") from None
    except ValueError as error:
        raise ConversionError(str(error)) from None


def all_finite(values: Tensor) -> bool:
    """True if no value is NaN or infinite; unlike isfinite it needs no memory."""
    return all(
        extreme.isfinite() for extreme in values.aminmax()
    )  # both are NaN where one value is


class SourceFolder:
    """The tensors of a folder by name.

    MXFP4 tensors are stored as `<name>_blocks` and `<name>_scales`, FP8 ones with
    `<name>_scale_inv`; `dtype`, `shape` and `read` refer to dequantized values.

    Raises:
        ConversionError: there are no safetensors, the index is unusable, or the tensors of the
            model are ambiguous.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self._files = _files(folder)
        self.names = set(self._files)
        self._block = _block(config)
        self._open: tuple[str, Any] = ("", None)
        self._read = 0

    def dtype(self, name: str) -> torch.dtype:
        """bf16 or fp32; a ConversionError if the tensor is missing, or of another dtype."""
        if self._is_mxfp4(name):
            return torch.bfloat16
        stored = self._stored(name)
        if stored == "F8_E4M3":
            self._slice(f"{name}_scale_inv")
            return torch.bfloat16
        if stored not in _DTYPES:
            known = "BF16, F32, F8_E4M3 with _scale_inv, MXFP4 as _blocks and _scales"
            raise ConversionError(f"{name} is stored as {stored}, which is none of {known}")
        return _DTYPES[stored]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the values; a ConversionError without a tensor that matches its scales."""
        if not self._is_mxfp4(name):
            shape = self._shape(name)
            if self._stored(name) == "F8_E4M3":
                pairs = zip(shape, self._block, strict=True) if len(shape) == 2 else ()
                self._expect(f"{name}_scale_inv", [math.ceil(n / b) for n, b in pairs])
            return shape
        blocks = self._shape(f"{name}_blocks")
        if len(blocks) != 4 or blocks[-1] != 16:
            raise ConversionError(f"{name}_blocks has shape {list(blocks)}, not [E, rows, N, 16]")
        self._expect(f"{name}_scales", list(blocks[:-1]))
        experts, outputs, groups, _ = blocks
        return experts, 32 * groups, outputs  # transposed, as the unquantised tensor is stored

    def parts(self, name: str) -> set[str]:
        """Names under which the folder stores a tensor."""
        if self._is_mxfp4(name):
            return {f"{name}_blocks", f"{name}_scales"}
        return {name, f"{name}_scale_inv"} & self.names

    def read(self, name: str, rows: tuple[int, int]) -> Tensor:
        """Rows of a tensor, as a copy; a ConversionError for a value that is NaN or infinite."""
        values = self._values(name, *rows)
        if not all_finite(values):
            raise ConversionError(f"{name} has values that are NaN or infinite")
        return values

    def _values(self, name: str, start: int, stop: int) -> Tensor:
        if self._is_mxfp4(name):
            blocks, scales = (self._rows(f"{name}_{s}", start, stop) for s in ("blocks", "scales"))
            return from_mxfp4(blocks, scales).transpose(1, 2)
        if self._stored(name) == "F8_E4M3":
            scale = self._slice(f"{name}_scale_inv")[:]
            return from_fp8(self._rows(name, start, stop), scale, self._block, start)
        return self._rows(name, start, stop)

    def _is_mxfp4(self, name: str) -> bool:
        return name not in self._files and f"{name}_blocks" in self._files

    def _expect(self, name: str, shape: list[int]) -> None:
        if (actual := list(self._shape(name))) != shape:
            raise ConversionError(f"{name} has shape {actual}, not {shape}")

    def _stored(self, name: str) -> str:
        return str(self._slice(name).get_dtype())

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        rows = self._slice(name)[start:stop].clone()
        self._read += rows.nbytes
        return rows

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise ConversionError(f"{name} is missing from {self.folder}")
        file = self._files[name]
        try:
            if self._open[0] != file or self._read > _MAPPED:
                self._open, self._read = (file, safe_open(self.folder / file, "pt")), 0
            return self._open[1].get_slice(name)
        except FileNotFoundError:
            raise ConversionError(f"{self.folder / file} is missing") from None
        except SafetensorError as error:
            raise ConversionError(f"{self.folder / file}: {name} cannot be read: {error}") from None


def _files(folder: Path) -> dict[str, str]:
    """Tensor name -> file that holds it, from the headers of the files, as in transformers.

    Ambiguous are a single file besides shards, a tensor in two shards, and an adapter.
    """
    if (folder / _ADAPTER).is_file():
        raise ConversionError(
            f"{folder} has {_ADAPTER}, of an adapter that changes the weights: merge it into them, "
            "or remove the file to import the model without it"
        )
    named = _indexed(folder / INDEX) if (folder / INDEX).is_file() else {}
    shards = sorted(set(named.values()))
    if not (folder / _SINGLE).is_file():
        if not named:
            raise ConversionError(
                f"{folder} has neither {INDEX} nor {_SINGLE}: only safetensors are read"
            )
    elif shards in ([], [_SINGLE]):
        return dict.fromkeys(_header(folder / _SINGLE), _SINGLE)
    else:
        other = next(shard for shard in shards if shard != _SINGLE)
        raise ConversionError(
            f"{folder} has {_SINGLE} and an {INDEX} that names {other}: it is ambiguous which of "
            "them is the model; remove the file or the index"
        )
    files: dict[str, str] = {}
    for shard in shards:
        for name in _header(folder / shard):
            if name in files:
                raise ConversionError(
                    f"{folder} has {name} in {files[name]} and in {shard}: it is ambiguous which "
                    "of them is the model's; remove one"
                )
            files[name] = shard
    for name, shard in named.items():
        if files.get(name) != shard:
            raise ConversionError(f"{folder / INDEX} has {name} in {shard}, which lacks it")
    return files


def _indexed(index: Path) -> dict[str, str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConversionError(f"{index} has no weight_map")
    for file in files.values():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise ConversionError(
                f"{index} names {str(file)[:80]!r}: a shard is a .safetensors file in the folder"
            )
    return files


def _header(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except FileNotFoundError:
        raise ConversionError(f"{file} is missing") from None
    except SafetensorError as error:
        raise ConversionError(f"{file} cannot be read: {error}") from None


def _block(config: dict[str, Any]) -> tuple[int, int]:
    quantised = config.get("quantization_config")
    size = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    if size is None:
        return _BLOCK
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n for n in size)):
        raise ConversionError(f"config.json has weight_block_size={size}, not two sizes")
    return size[0], size[1]


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
_SCALES = torch.tensor([*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan])


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Values, bf16 [..., 32 * N], of MXFP4 blocks.

    Args:
        blocks: uint8 [..., N, 16], two values a byte, the first in the low four bits.
        scales: uint8 [..., N], the exponent of each block plus 127.
    """
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = _VALUES[codes.int()] * _SCALES[scales.int()][..., None]
    return values.flatten(-2).to(torch.bfloat16)


def from_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], first_row: int = 0) -> Tensor:
    """Values, bf16 [R, C], of rows of a matrix with a scale per block.

    Args:
        weight: float8_e4m3fn [R, C], which starts at `first_row` of the full matrix.
        scale: of the full matrix, [rows / block[0], C / block[1]] rounded up; any float dtype.
        block: rows and columns that share a scale.
        first_row: row of the full matrix.
    """
    rows = torch.arange(first_row, first_row + weight.size(0)) // block[0]
    columns = torch.arange(weight.size(1)) // block[1]
    return (weight.float() * scale.float()[rows][:, columns]).to(torch.bfloat16)
