"""A file of recorded routing: the experts that the tokens of a run chose, layer by layer.

It is written after the last step of a run (`run.record_routing`) or by hand
(`scripts/lab/make_routing.py`), and read by routers that replay it (`model.moe.router.replay`). It
is a safetensors file: a tensor [tokens, top_k] for each layer, in uint8 for up to 256 experts and
uint16 for more, best expert first, and facts in its metadata. This module needs no torch.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from phalanx.configs.schema import ModelConfig

FORMAT = "phalanx routing 1"
MOST_TOKENS = 65_536  # largest number of tokens of a layer: one large micro-batch of eight ranks

Ids = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class RecordingFacts:
    """Description of a recording."""

    model: str
    experts: int
    top_k: int
    tokens: int  # tokens of each layer
    step: int  # step after which the routing was recorded
    layers: tuple[str, ...]  # names of the layers (`layer_name`)


def layer_name(number: int, prediction: bool) -> str:
    """Name of a layer, by its number from 1 within decoder or prediction layers."""
    return f"{'prediction' if prediction else 'layer'}.{number}"


def layer_names(model: ModelConfig) -> Iterator[str]:
    """Names of all layers of a model that have experts."""
    for number in range(model.moe.dense_layers, model.layers):
        yield layer_name(number + 1, prediction=False)
    for number in range(model.mtp_layers):
        yield layer_name(number + 1, prediction=True)


def write(
    path: Path, ids: Mapping[str, Ids], *, model: str, experts: int, step: int
) -> RecordingFacts:
    """Write the choices [tokens, top_k] of each layer to a file, and make its folder.

    Raises:
        OSError: the file cannot be written.
        ValueError: a choice outside the experts, which the file's dtype could truncate.
    """
    for name, ids_TK in ids.items():
        if ids_TK.size and not 0 <= ids_TK.min() <= ids_TK.max() < experts:
            span = f"{ids_TK.min()} to {ids_TK.max()}"
            raise ValueError(f"{name} has ids from {span} of {experts} experts")
    tokens, top_k = next(iter(ids.values())).shape
    facts = RecordingFacts(model, experts, top_k, tokens, step, tuple(ids))
    dtype = np.uint8 if experts <= 256 else np.uint16
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        tensors = {name: np.ascontiguousarray(x.astype(dtype)) for name, x in ids.items()}
        save_file(tensors, path, {"format": FORMAT, "facts": json.dumps(asdict(facts))})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    return facts


def read_facts(path: str | Path) -> RecordingFacts:
    """Facts in the metadata of a file.

    Raises ValueError, with one line, if it does not exist or is no recorded routing.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise ValueError(f"{path} cannot be read: {reason}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a recorded routing, which run.record_routing writes")
    try:
        facts = json.loads(metadata["facts"])
        return RecordingFacts(**facts | {"layers": tuple(facts["layers"])})
    except (ValueError, KeyError, TypeError):
        names = ", ".join(f.name for f in fields(RecordingFacts))
        raise ValueError(f"{path} has no facts in its metadata: JSON with {names}") from None


def read_layer(path: str | Path, name: str) -> Ids:
    """Choices [tokens, top_k] of a layer; a ValueError if they contradict the facts of the file."""
    facts = read_facts(path)
    try:
        with safe_open(path, framework="numpy") as file:
            ids: Ids = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} has no {name}: {error}") from None
    shape = (facts.tokens, facts.top_k)
    if ids.shape != shape or ids.dtype.kind not in "ui":
        actual = f"{ids.dtype} {list(ids.shape)}"
        raise ValueError(f"{path}: {name} is {actual}, not integers {list(shape)}")
    if problem := invalid_choice(ids, facts.experts):
        raise ValueError(f"{path}: {name} {problem}")
    return ids


def invalid_choice(ids: Ids, experts: int) -> str:
    """Problem with integers [tokens, top_k] as choices of `experts` experts; empty if none."""
    outside = (ids < 0) | (ids >= experts)
    if outside.any():
        token = int(outside.any(1).argmax())
        wrong = int(ids[token][outside[token]][0])
        return f"has expert {wrong} of token {token}, and experts are 0 to {experts - 1}"
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    return f"has an expert twice of token {int(twice.argmax())}" if twice.any() else ""


def mismatch(facts: RecordingFacts, model: ModelConfig) -> str | None:
    """Reason for which a model cannot replay a recording; None if it can. Extra layers are fine."""
    wanted = {"model.moe.experts": model.moe.experts, "model.moe.top_k": model.moe.top_k}
    recorded = (facts.experts, facts.top_k)
    for (knob, value), old in zip(wanted.items(), recorded, strict=True):
        if value != old:
            return f"was recorded of {facts.model} with {knob}={old}, but this run has {value}"
    missing = [name for name in layer_names(model) if name not in facts.layers]
    if missing:
        return f"was recorded of {facts.model} without {missing[0]} of this model"
    return None
