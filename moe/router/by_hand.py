"""A routing that nobody recorded: written by hand as JSON, or drawn with weights of the experts.

Both give the choices of every layer of a model, which `moe.router.recording.write` makes a file of.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.configs.knobs import counted
from phalanx.configs.schema import ModelConfig
from phalanx.moe.router.recording import MOST_TOKENS, Ids, invalid_choice, layer_names

OTHERS = "*"
"""Name, in JSON, of all layers that are not named."""


def read_choices(path: Path, model: ModelConfig) -> dict[str, Ids]:
    """The choices [tokens, top_k] of each layer, as a JSON object has them.

    Args:
        path: file with a list for each layer name, or for `*`; in it a list for each token, of the
            experts that it chooses, best first.
        model: whose layers, experts and top-k they are.

    Raises:
        ValueError: it is no such object; one line with the file and what is wrong.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f'{path} is no object of layers, as in {{"*": [[0, 1], [2, 3]]}}')
    names = _layers(model)
    for name in found:
        if name not in (*names, OTHERS):
            raise ValueError(
                f"{path} has {name!r}, and the layers are {_few(names)}, or {OTHERS!r}"
            )
    ids = {}
    for name in names:
        key = name if name in found else OTHERS
        if key not in found:
            raise ValueError(f"{path} has no choices of {name}, and none of {OTHERS!r}")
        ids[name] = _array(path, key, found[key], model)
    sizes = {len(of) for of in ids.values()}
    if len(sizes) > 1:
        raise ValueError(f"{path} has {min(sizes)} tokens of one layer and {max(sizes)} of another")
    return ids


def random_choices(
    model: ModelConfig, weights: Mapping[int, float], tokens: int, seed: int
) -> dict[str, Ids]:
    """Random choices [tokens, top_k] of each layer.

    Args:
        model: whose layers, experts and top-k they are.
        weights: of experts, above 0; those that are not named have 1. A token draws its experts
            one after the other, each with a probability in proportion to its weight.
        tokens: of each layer.
        seed: of the draw.

    Raises:
        ValueError: an expert or a number is out of range; one line.
    """
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{tokens} tokens: a file holds 1 to {MOST_TOKENS}")
    log_E = np.zeros(model.moe.experts)
    for expert, weight in weights.items():
        if not 0 <= expert < model.moe.experts:
            raise ValueError(f"there is no expert {expert}, but 0 to {model.moe.experts - 1}")
        if not (weight > 0 and np.isfinite(weight)):
            raise ValueError(f"expert {expert} has weight {weight}, which must be above 0")
        log_E[expert] = np.log(weight)
    ids = {}
    for number, name in enumerate(_layers(model)):
        noise_TE = np.random.default_rng([seed, number]).gumbel(size=(tokens, model.moe.experts))
        ids[name] = np.argsort(-(noise_TE + log_E), axis=1)[:, : model.moe.top_k]
    return ids


def _layers(model: ModelConfig) -> list[str]:
    if not (names := list(layer_names(model))):
        raise ValueError(f"{model.name} has no layer with experts: lower model.moe.dense_layers")
    return names


def _array(path: Path, name: str, rows: Any, model: ModelConfig) -> Ids:
    try:
        ids = np.array(rows)
    except (ValueError, OverflowError):  # rows of unequal length
        ids = np.array(None)
    shape = f"a list of {model.moe.top_k} experts for each token"
    if ids.ndim != 2 or ids.dtype.kind != "i" or ids.shape[1] != model.moe.top_k:
        raise ValueError(f"{path}: {name!r} is not {shape} (model.moe.top_k)")
    if not 1 <= len(ids) <= MOST_TOKENS:
        raise ValueError(
            f"{path}: {name!r} has {counted(len(ids), 'token')}; a file holds 1 to {MOST_TOKENS}"
        )
    if why := invalid_choice(ids, model.moe.experts):
        raise ValueError(f"{path}: {name!r} {why}")
    return ids


def _few(names: list[str]) -> str:
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
