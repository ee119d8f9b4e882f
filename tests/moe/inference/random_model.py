"""A predictor without a checkpoint: a configuration's model with random weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from phalanx.configs.load import load


@contextmanager
def opened(overrides: list[str], std: float = 0.2) -> Iterator[Any]:
    """As `moe.inference.predictor.opened`, inside a rank; weights are normal, also sinks."""
    from phalanx.moe.inference import predictor as module

    common = {"config": asdict(load(overrides))}

    def fill(path: Any, record: Any, chunks: list[Any], group: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, weight in chunks[0].named_parameters():
            values = torch.randn(weight.shape, generator=generator) * std
            # Norms multiply by about 1; sinks are in the range of logits.
            values += 1 if "norm" in name and name.endswith("weight") else 0
            weight.data.copy_(values * (5 if "softmax_offset" in name else 1))

    with (
        mock.patch.object(module, "verify", return_value=SimpleNamespace(step=0)),
        mock.patch.object(module, "read_common", return_value=common),
        mock.patch.object(module, "load_weights", fill),
        module.opened(Path("none")) as predictor,
    ):
        yield predictor
