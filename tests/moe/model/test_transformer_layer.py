"""Our layer against Megatron-Core's: bits, names in checkpoints, and both ways to add residuals."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.moe.model.test_features import (
    MLA,
    SMALL,
    TINY_DEEPSEEK,
    TINY_GPT_OSS,
    built,
    fill,
    tokens,
)
from tests.support.distributed import run_distributed

MODELS = {
    "gqa": SMALL,
    "gqa_norms": [*SMALL, "model.attention.qk_norm=true"],
    "bias_sinks_window": TINY_GPT_OSS,
    "mla_dense_shared_mtp": [*TINY_DEEPSEEK, "model.mtp_layers=1"],
    "mla": MLA,
    "dense": [*SMALL, "model.moe.dense_layers=1"],
}
Results = tuple[dict[str, torch.Tensor], list[str], list[str]]


@contextmanager
def megatrons_layers() -> Iterator[None]:
    """`moe.model.gpt` with Megatron-Core's layer, and norms that return one tensor."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from phalanx.moe.model import gpt

    class Theirs(TransformerLayer):
        def __init__(self, *given: Any, memory: Any, **named: Any) -> None:
            super().__init__(*given, **named)

    ours = gpt.Layer, gpt.norm_class
    norm_class: Any = gpt.norm_class
    gpt.Layer = Theirs  # type: ignore[misc]
    gpt.norm_class = lambda backend, residual=False: norm_class(backend)
    try:
        yield
    finally:
        gpt.Layer, gpt.norm_class = ours  # type: ignore[misc]


def _results(overrides: list[str], adds: bool) -> Results:
    """Loss and gradients, names of parameters and of entries of a checkpoint."""
    from phalanx.moe.layer import MoE

    cfg, model = built(overrides)
    fill(model)
    for module in model.modules():
        if isinstance(module, MoE):
            module._combine_in_experts = adds  # as with the fused experts
    ids, labels = tokens(cfg.model.vocab_size)
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    model.train()
    loss = model(input_ids=ids, position_ids=places, attention_mask=None, labels=labels)
    loss.sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    entries = model.sharded_state_dict(metadata={"dp_cp_group": torch.distributed.group.WORLD})
    return {"loss": loss.detach(), **gradients}, list(model.state_dict()), sorted(entries)


def _compare(overrides: list[str]) -> tuple[Results, Results, Results]:
    ours, added = _results(overrides, False), _results(overrides, True)
    with megatrons_layers():
        theirs = _results(overrides, False)
    return ours, added, theirs


@pytest.mark.dist
@pytest.mark.parametrize("name", MODELS)
def test_equals_megatrons_layer_bit_for_bit(name: str) -> None:
    ((ours, added, theirs),) = run_distributed(_compare, 1, MODELS[name])
    assert ours[1] == theirs[1] and ours[2] == theirs[2]
    assert ours[0].keys() == theirs[0].keys() == added[0].keys()
    for key, value in theirs[0].items():
        assert torch.equal(ours[0][key], value), key
        # Shared experts before the others: gradients of what both read are added in another order.
        torch.testing.assert_close(added[0][key], value, rtol=1e-4, atol=1e-5)


def _refused(change: dict[str, Any]) -> str:
    from phalanx.moe.model import megatron_config

    transformer_config = megatron_config.transformer_config

    def changed(*given: Any, **named: Any) -> Any:
        config = transformer_config(*given, **named)
        for name, value in change.items():
            setattr(config, name, value)
        return config

    megatron_config.transformer_config = changed
    try:
        built(SMALL)
    except ValueError as error:
        return str(error)
    finally:
        megatron_config.transformer_config = transformer_config
    return ""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_dropout": 0.1}, "no dropout"),
        ({"fp32_residual_connection": True}, "no residuals in fp32"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            "run.recompute selects what layers recompute",
        ),
    ],
)
def test_what_it_does_not_do_is_refused(change: dict[str, Any], words: str) -> None:
    (said,) = run_distributed(_refused, 1, change)
    assert words in said
