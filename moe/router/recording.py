"""A file of recorded routing: which experts the tokens of a run chose, layer by layer.

Written after the last step of a run (`run.record_routing`) or made by hand (`moe.router.by_hand`),
read by routers that replay it (`model.moe.router.replay`). A safetensors file: a tensor
[tokens, top_k] for each layer, in uint8 for up to 256 experts and uint16 for more, best expert
first, and facts in its metadata. This module needs no torch, so that a file can be checked before a
run starts.
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
MOST_TOKENS = 65_536
"""Of a layer: one micro-batch of eight ranks, as large as models are trained with."""

Ids = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class RecordingFacts:
    """What was recorded."""

    model: str
    experts: int
    top_k: int
    tokens: int
    """Of each layer."""
    step: int
    """After which the model chose."""
    layers: tuple[str, ...]
    """Names, as of `layer_name`."""


def layer_name(number: int, prediction: bool) -> str:
    """Of a layer, by its number from 1 within decoder or prediction layers."""
    return f"{'prediction' if prediction else 'layer'}.{number}"


def layer_names(model: ModelConfig) -> Iterator[str]:
    """Of all layers of a model that have experts."""
    for number in range(model.moe.dense_layers, model.layers):
        yield layer_name(number + 1, prediction=False)
    for number in range(model.mtp_layers):
        yield layer_name(number + 1, prediction=True)


def write(
    path: Path, ids: Mapping[str, Ids], *, model: str, experts: int, step: int
) -> RecordingFacts:
    """Make the file of the choices [tokens, top_k] of each layer, and folders for it.

    Raises:
        OSError: it cannot be written.
        ValueError: a choice that is no expert, which the file's dtype could cut to one; one line.
    """
    for name, of in ids.items():
        if of.size and not 0 <= of.min() <= of.max() < experts:
            raise ValueError(f"{name} has ids from {of.min()} to {of.max()} of {experts} experts")
    tokens, top_k = next(iter(ids.values())).shape
    facts = RecordingFacts(model, experts, top_k, tokens, step, tuple(ids))
    dtype = np.uint8 if experts <= 256 else np.uint16
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        tensors = {name: np.ascontiguousarray(of.astype(dtype)) for name, of in ids.items()}
        save_file(tensors, path, {"format": FORMAT, "facts": json.dumps(asdict(facts))})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    return facts


def read_facts(path: str | Path) -> RecordingFacts:
    """Of a file.

    Raises:
        ValueError: there is no such file, or it is none of a recorded routing; one line.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise ValueError(f"{path} cannot be read: {reason}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is no recorded routing, which run.record_routing writes")
    try:
        found = json.loads(metadata["facts"])
        return RecordingFacts(**found | {"layers": tuple(found["layers"])})
    except (ValueError, KeyError, TypeError):
        names = ", ".join(f.name for f in fields(RecordingFacts))
        raise ValueError(f"{path} has no facts in its metadata: JSON with {names}") from None


def read_layer(path: str | Path, name: str) -> Ids:
    """Choices [tokens, top_k] of a layer.

    Raises:
        ValueError: they are not as the facts of the file say; one line.
    """
    facts = read_facts(path)
    try:
        with safe_open(path, framework="numpy") as file:
            found: Ids = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} has no {name}: {error}") from None
    shape = (facts.tokens, facts.top_k)
    if found.shape != shape or found.dtype.kind not in "ui":
        has = f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"{path}: {name} is {has}, not whole numbers {list(shape)}")
    if why := invalid_choice(found, facts.experts):
        raise ValueError(f"{path}: {name} {why}")
    return found


def invalid_choice(ids: Ids, experts: int) -> str:
    """Why whole numbers [tokens, top_k] are no choices of so many experts; empty if they are."""
    outside = (ids < 0) | (ids >= experts)
    if outside.any():
        token = int(outside.any(1).argmax())
        wrong = int(ids[token][outside[token]][0])
        return f"has expert {wrong} of token {token}, and experts are 0 to {experts - 1}"
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    return f"has an expert twice of token {int(twice.argmax())}" if twice.any() else ""


def mismatch(facts: RecordingFacts, model: ModelConfig) -> str | None:
    """Why a model cannot replay a recorded routing; None if it can. More layers do no harm."""
    mine = {"model.moe.experts": model.moe.experts, "model.moe.top_k": model.moe.top_k}
    theirs = (facts.experts, facts.top_k)
    for (knob, wanted), has in zip(mine.items(), theirs, strict=True):
        if wanted != has:
            return f"was recorded of {facts.model} with {knob}={has}, and here it is {wanted}"
    missing = [name for name in layer_names(model) if name not in facts.layers]
    if missing:
        return f"was recorded of {facts.model} without {missing[0]} of this model"
    return None
