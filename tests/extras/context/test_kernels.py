"""Kernels that a run with shared heads launches, beside those that are listed for it."""

from unittest import mock

import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from tests.moe.test_compiled_shapes import ON_CPU, RUN, WINDOWS, Calls, _launched, keys
from tests.support.distributed import run_distributed


def _with_heads(cfg: Config) -> Calls:
    from phalanx.extras.context import heads
    from phalanx.moe.model import attention

    def recorded(*given: object, **named: object) -> object:
        return attention.attention(*given, **named)  # type: ignore[arg-type]

    with mock.patch.object(heads, "attention", recorded):
        return _launched(cfg)


@pytest.mark.dist
def test_a_model_calls_what_is_listed() -> None:
    overrides = [*WINDOWS, "data=embedded", "data.document_mask=true", "parallel.context=2", *RUN]
    ranks = run_distributed(_with_heads, 2, load([*overrides, *ON_CPU]), timeout=300)
    called = tuple(set().union(*kind) for kind in zip(*ranks, strict=True))
    assert called == keys(*overrides)
