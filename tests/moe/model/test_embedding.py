"""Training with the embedding's gradient in the buffer of its weight, and with Megatron-Core's."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from tests.moe.model.test_main_grad import SMALL
from tests.support.scheduling import mostly_slow
from tests.support.training import trained


@contextmanager
def adding(rank: int) -> Iterator[None]:
    """The embedding alone adds to its buffer: linear layers do on a GPU only."""
    from phalanx.kernels.elementwise import rows
    from phalanx.moe.model import embedding

    forward, calls = embedding.WordEmbedding.forward, mock.Mock(wraps=rows.index_add_)

    def adds(self: Any, ids: torch.Tensor) -> torch.Tensor:
        self.config = copy.copy(self.config)
        self.config.gradient_accumulation_fusion = True
        return forward(self, ids)

    with (
        mock.patch.object(embedding.WordEmbedding, "forward", adds),
        mock.patch.object(embedding, "index_add_", calls),
    ):
        yield
    assert calls.called or rank > 0  # of two stages the first has the embedding


CASES = {
    "one rank": (1, {}),
    "tied, with prediction": (1, {"model.tie_embeddings": True, "model.mtp_layers": 1}),
    "tensor parallel": (2, {"parallel.tensor": 2}),
    "tied, over two stages": (2, {"model.tie_embeddings": True, "parallel.pipeline": 2}),
    "no overlap": (2, {"parallel.overlap": False}),
}


@pytest.mark.dist
@mostly_slow("case", CASES, *(case for case in CASES if case != "one rank"))
def test_trains_alike(case: str) -> None:
    world, changes = CASES[case]
    changes = {**changes, "precision.recipe": "fp32", "data.micro_batch": 2}
    overrides = ["model=tiny", *SMALL]
    plain, fused = (trained(world, overrides, changes, within=w) for w in (None, adding))
    for name in ("loss", "grad_norm"):
        assert fused.series(name) == pytest.approx(plain.series(name), rel=1e-5)
    key = next(k for k in plain.after if k.endswith("word_embeddings.weight"))
    assert not torch.equal(plain.before[key], plain.after[key])
    for key, value in plain.after.items():
        torch.testing.assert_close(fused.after[key], value, rtol=1e-5, atol=1e-6)
