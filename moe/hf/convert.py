"""Import of a Hugging Face folder as a checkpoint, and export of a checkpoint as a folder.

Both iterate over the regions of `hf.weights` and hold one at a time. The result is renamed to its
final name when it is complete.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from phalanx.configs.knobs import put
from phalanx.configs.schema import Config, ModelConfig
from phalanx.moe.data.tokenizer.special_tokens import GENERATION, Chosen, SpecialTokens
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.card import CARD, Source, card
from phalanx.moe.hf.config import besides, prediction_prefix, to_json, to_knobs
from phalanx.moe.hf.pieces import PieceReader, PieceWriter
from phalanx.moe.hf.source import INDEX, SourceFolder, all_finite, read_json
from phalanx.moe.hf.tokenizer_files import (
    SETTINGS,
    TEMPLATE,
    check_tokenizer,
    files_of_data,
    files_of_folder,
    imported_tokens,
    special_tokens,
)
from phalanx.moe.hf.weights import TensorRegion, regions
from phalanx.parallel.checkpoint.saved_knobs import SavedKnobs, understood
from phalanx.parallel.object_store import Place

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


class Shards:
    """New safetensors shards in an empty folder, and their index.

    The safetensors library needs all tensors of a shard in memory. Here headers are written first,
    and then data in any order (https://huggingface.co/docs/safetensors: 8 bytes length, JSON
    header, data). The `tensors`, name -> (dtype, shape), are in the order of storage. A shard has
    at most `limit` bytes of data; a larger tensor has a separate one.
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

        Raises ConversionError for a value that is NaN or infinite in the dtype of the shard.
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


log = logging.getLogger(__name__)

Progress = Callable[[int, int], object]  # amount done since the last call, and total

SHARD = 5_000_000_000  # bytes of data in an exported file
_CONTEXT = 4096  # tokens, if neither run nor imported model define it


def determined(folder: Path, tokens: Chosen | None = None) -> dict[str, Any]:
    """Knobs below `model.` of the model in a folder; `tokens` are ids of special tokens.

    Raises:
        ConversionError: the model has no counterpart here, or the folder does not exist.
    """
    if not folder.is_dir():
        hint = ""
        if not folder.is_absolute() and len(folder.parts) == 2:  # a model's name on a hub
            hint = f"; download one of a hub: hf download {folder} --local-dir {folder.name}"
        raise ConversionError(
            f"there is no folder {folder}: a model is read from a local one{hint}"
        )
    config = read_json(folder / "config.json") | dict(tokens or {})
    found = to_knobs(config)
    # transformers drops the prediction layers when it saves, but keeps their number.
    names, first = SourceFolder(folder, config).names, prediction_prefix(config, found["layers"])
    if not any(name.startswith(first) for name in names):
        found["mtp_layers"] = 0
    return found


def import_folder(
    folder: Path,
    out: Path,
    model: ModelConfig,
    progress: Progress = lambda done, total: None,
    tokens: Chosen | None = None,
) -> None:
    """Write a Hugging Face folder as a checkpoint of step 0 without an optimizer's state.

    Args:
        model: compatible with `determined(folder)`; fewer `mtp_layers` drop the others.
        progress: in regions.
        tokens: as for `determined`.

    Raises:
        ConversionError: a tensor is missing, unexpected, of another shape or has values that are
            NaN or infinite; a special token or the tokenizer is outside the vocabulary; `out`
            exists.
    """
    config = read_json(folder / "config.json") | dict(tokens or {})
    extra = imported_tokens(folder, config, model.vocab_size, tokens)
    source, depths = SourceFolder(folder, config), to_knobs(config)["mtp_layers"]
    plan = [r for r in regions(model) if not r.repeated or r.parts[0].name in source.names]
    left_out = tuple(
        prediction_prefix(config, model.layers + depth) for depth in range(model.mtp_layers, depths)
    )
    dtypes = _check(source, plan, left_out)
    first = {(r.key, r.rows): r for r in plan if not r.repeated}
    with new_folder(out) as unfinished:
        writer = PieceWriter(unfinished)
        for region in plan:
            values = _assembled(source, region, dtypes[region.key])
            if region.repeated:
                original = first[region.key, region.rows]
                if not torch.equal(values, _assembled(source, original, dtypes[region.key])):
                    names = f"{region.parts[0].name} and {original.parts[0].name}"
                    raise ConversionError(f"{names} differ, but are one tensor here (--no-mtp)")
            else:
                writer.add(region.key, region.shape, region.rows[0], values)
            progress(1, len(plan))
        common = {
            "config": {"model": asdict(model)},
            "step": 0,
            "data": {"consumed_samples": 0},
            "weights_only": True,
            "huggingface": extra,
        }
        writer.commit(out, common)


def export_checkpoint(
    checkpoint: Place,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    chat_template: Path | None = None,
    shard_bytes: int = SHARD,
    tokens: Chosen | None = None,
    verifying: Progress = lambda done, total: None,
    progress: Progress = lambda done, total: None,
) -> SpecialTokens:
    """Write a checkpoint as a Hugging Face folder, with a tokenizer; returns its special tokens.

    Args:
        checkpoint: folder or address, of any run and layout; it is verified first.
        dtype: of the weights, bf16 or fp32; that of the checkpoint by default.
        tokenizer: folder whose tokenizer files are copied; that of the run's data by default.
        chat_template: file in place of the tokenizer's.
        shard_bytes: maximum bytes of data in one file.
        tokens: ids of special tokens that replace the known ones.
        verifying: progress of the verification, in bytes.
        progress: in regions.

    Raises:
        ConversionError: the checkpoint is invalid, has a model that Hugging Face does not have, or
            values that are NaN or infinite; a special token or tokenizer is of another model.
        CheckpointMismatch: its configuration is not understood.
    """
    named = files_of_folder(tokenizer) if tokenizer else None
    with new_folder(out) as unfinished:
        reader = PieceReader(checkpoint, verifying)
        saved = understood(reader.common.get("config", {}))
        if ignored := saved.ignored_note():
            log.warning("%s: %s", checkpoint, ignored)
        model, data = _model(saved), _section(saved, "data.")
        base = reader.common.get("huggingface")
        base = base if isinstance(base, dict) else {}
        context = max(data.get("sequence_length", 0), besides(base).get(_POSITIONS, 0)) or _CONTEXT
        if tokenizer:
            check_tokenizer(tokenizer, data, model.vocab_size)
        files = named or files_of_data(data, model.vocab_size)
        special = special_tokens(data, tokenizer, base, model.vocab_size, tokens)
        weights = dtype or (reader.dtype(_WORDS) if _WORDS in reader.keys() else torch.bfloat16)
        text = to_json(model, context, str(weights).removeprefix("torch.")) | special.ids
        plan = list(regions(model))
        stored: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for region in plan:
            _fits(region, reader)
            for part in region.parts:
                kind = torch.float32 if region.exact else dtype or reader.dtype(region.key)
                stored[part.name] = (kind, part.shape)
        shards = Shards(unfinished, stored, shard_bytes)
        for region in plan:
            values = reader.read(region.key, region.rows)
            for part in region.parts:
                shards.write(part.name, part.rows[0], part.view(values))
            progress(1, len(plan))
        shards.index()
        _write(unfinished / "config.json", text)
        _write(unfinished / GENERATION, special.generation)
        files.write(unfinished, special.ids, context)
        if chat_template is not None:
            _copy_template(chat_template, unfinished)
        family, kept = text["model_type"], text["dtype"]
        facts = Source(checkpoint, reader.common, saved.values, model, family, context, kept)
        (unfinished / CARD).write_text(card(facts), encoding="utf-8")
        unfinished.rename(out)
    return replace(special, notes=(*special.notes, files.note))


def _copy_template(file: Path, folder: Path) -> None:
    """Put a chat template where readers look first, and nowhere else."""
    try:
        source = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConversionError(f"chat template {file} cannot be read: {reason}") from None
    (folder / TEMPLATE).write_text(source)
    settings = folder / SETTINGS
    if settings.is_file() and "chat_template" in (values := read_json(settings)):
        _write(settings, {name: v for name, v in values.items() if name != "chat_template"})


_WORDS = "embedding.word_embeddings.weight"
_POSITIONS = "max_position_embeddings"


def _check(
    source: SourceFolder, plan: list[TensorRegion], left_out: tuple[str, ...]
) -> dict[str, torch.dtype]:
    """Dtype of every tensor of the checkpoint, the widest of its parts; checks names and shapes."""
    dtypes: dict[str, torch.dtype] = {}
    used: set[str] = set()
    known: dict[str, torch.dtype] = {}
    for region in plan:
        for part in region.parts:
            if part.name not in known:
                known[part.name] = source.dtype(part.name)
                if (shape := source.shape(part.name)) != part.shape:
                    raise ConversionError(
                        f"{part.name} has shape {list(shape)}, not {list(part.shape)} as "
                        "config.json says"
                    )
                used |= source.parts(part.name)
            kind = torch.float32 if region.exact else known[part.name]
            dtypes[region.key] = torch.promote_types(dtypes.get(region.key, kind), kind)
    for name in sorted(source.names - used):
        if not name.startswith(left_out) and not name.endswith("rotary_emb.inv_freq"):
            raise ConversionError(f"{name} is unexpected: the model of config.json has no such")
    return dtypes


def _assembled(source: SourceFolder, region: TensorRegion, dtype: torch.dtype) -> Tensor:
    start, stop = region.rows
    values = torch.empty((stop - start, *region.shape[1:]), dtype=dtype)
    for part in region.parts:
        view = part.view(values)
        view.copy_(source.read(part.name, part.rows).reshape(view.shape))
    return values


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _fits(region: TensorRegion, reader: PieceReader) -> None:
    if region.key not in reader.keys():
        raise ConversionError(f"{region.key} is missing from the checkpoint")
    if (shape := reader.shape(region.key)) != region.shape:
        raise ConversionError(f"{region.key} has shape {list(shape)}, not {list(region.shape)}")


def _model(saved: SavedKnobs) -> ModelConfig:
    cfg = Config()
    for path, value in saved.values.items():
        if path.startswith("model."):
            put(cfg, path, value)
    return cfg.model


def _section(saved: SavedKnobs, prefix: str) -> dict[str, Any]:
    knobs = saved.values.items()
    return {path.removeprefix(prefix): value for path, value in knobs if path.startswith(prefix)}


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder to fill and rename to `out`; it is deleted if it is not renamed."""
    unfinished = out.with_name(out.name + ".tmp")
    if out.exists():
        raise ConversionError(f"{out} exists; name a folder that does not")
    if unfinished.exists():
        raise ConversionError(f"{unfinished} exists, of a conversion that runs or was killed")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
