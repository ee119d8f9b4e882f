"""A routing that was not recorded: written by hand as JSON, or random with weights of the experts.

`moe.router.recording.write` writes these choices of every layer of a model to a file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.configs.knobs import pluralize
from phalanx.configs.schema import ModelConfig
from phalanx.moe.router.recording import MOST_TOKENS, Ids, invalid_choice, layer_names

OTHERS = "*"  # name, in JSON, of all layers that are not named


def read_choices(path: Path, model: ModelConfig) -> dict[str, Ids]:
    """Choices [tokens, top_k] of each layer of a model from a JSON file.

    It has a list for each layer name, or for `*`, of lists of the experts of one token, best first.
    Raises ValueError, one line with the file and the problem, or OSError.
    """
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(choices, dict):
        raise ValueError(f'{path} is not an object of layers, as in {{"*": [[0, 1], [2, 3]]}}')
    names = _layers(model)
    for name in choices:
        if name not in (*names, OTHERS):
            raise ValueError(
                f"{path} has {name!r}, but the layers are {_name_range(names)}, or {OTHERS!r}"
            )
    ids = {}
    for name in names:
        key = name if name in choices else OTHERS
        if key not in choices:
            raise ValueError(f"{path} has no choices of {name}, and none of {OTHERS!r}")
        ids[name] = _array(path, key, choices[key], model)
    sizes = {len(ids_TK) for ids_TK in ids.values()}
    if len(sizes) > 1:
        raise ValueError(f"{path} has {min(sizes)} tokens of one layer and {max(sizes)} of another")
    return ids


def random_choices(
    model: ModelConfig, weights: Mapping[int, float], tokens: int, seed: int
) -> dict[str, Ids]:
    """Random choices [tokens, top_k] of each layer.

    A token draws its experts one after the other, each with a probability in proportion to its
    weight, above 0, 1 by default. Raises ValueError, one line, for an expert or number out of
    range.
    """
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{tokens} tokens: a file holds 1 to {MOST_TOKENS}")
    log_E = np.zeros(model.moe.experts)
    for expert, weight in weights.items():
        if not 0 <= expert < model.moe.experts:
            raise ValueError(
                f"there is no expert {expert}: experts are 0 to {model.moe.experts - 1}"
            )
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
            f"{path}: {name!r} has {pluralize(len(ids), 'token')}; a file holds 1 to {MOST_TOKENS}"
        )
    if why := invalid_choice(ids, model.moe.experts):
        raise ValueError(f"{path}: {name!r} {why}")
    return ids


def _name_range(names: list[str]) -> str:
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
