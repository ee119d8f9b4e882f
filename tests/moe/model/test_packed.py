"""Models over packed documents: losses and gradients are those of the documents one by one.

Rotary angles are replaced by ones that do not grow evenly, so that attention depends on where a
document begins, which positions that differ by a constant would hide.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moe.model.test_features import (
    LINEAR,
    MLA,
    SMALL,
    TINY_DEEPSEEK,
    TINY_GPT_OSS,
    TINY_QWEN3_NEXT,
    YARN,
    built,
    fill,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import slow

TOKENS = 48
TWO = "model.layers=2"
ROWS = ((21, 1, 3, 2, 22), (49,), (20, 28, 1))
"""Rows of S + 1 tokens: ends inside and at the end of sequences, and a document longer than one."""


def unevenly(model: Any) -> None:
    """Add the same angles to all channels, by position: 0.02 p^2 radians."""

    def changed(forward: Any) -> Any:
        def angles(length: int, *args: Any, **kwargs: Any) -> Any:
            made = forward(length, *args, **kwargs)
            own, *rest = made if isinstance(made, tuple) else (made,)
            own = own + 0.02 * torch.arange(len(own))[:, None, None, None] ** 2
            return (own, *rest) if rest else own

        return angles

    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            module.forward = changed(module.forward)


def _packed_and_alone(overrides: list[str]) -> None:
    from phalanx.moe.data.packing import positions
    from phalanx.moe.labels import mean_loss, sample_losses
    from phalanx.moe.model.loss import LossContext
    from phalanx.moe.model.packed import packed
    from phalanx.parallel.megatron.patches import shift_within_documents

    cfg, model = built(overrides)
    fill(model)
    unevenly(model)
    shift_within_documents()
    ahead = cfg.model.mtp_layers
    text = torch.randint(
        0, cfg.model.vocab_size, (len(ROWS), TOKENS + 1), generator=torch.Generator().manual_seed(3)
    )
    place = torch.stack([torch.from_numpy(positions(torch.tensor(row).numpy())) for row in ROWS])
    mask, place = place[:, 1:] != 0, place[:, :-1]

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    lengths = [n for row in ROWS for n in row]
    documents = [d for row, ns in zip(text, ROWS, strict=True) for d in row.split(ns)]
    predicted = torch.tensor(sum(n - 1 for n in lengths))
    ahead_K = torch.tensor([sum(max(0, n - 2 - k) for n in lengths) for k in range(ahead)])
    assert predicted == mask.sum()
    together = LossContext(labels_ahead_K=ahead_K)
    losses = model(
        text[:, :-1].reshape(1, -1),
        place.reshape(1, -1),
        None,
        labels=text[:, 1:].reshape(1, -1),
        loss_mask=mask.reshape(1, -1),
        packed_seq_params=packed(place, places=0),
        losses=together,
    )
    total, count, report = mean_loss(losses, predicted, mask)
    got = gradients(total / count)

    want: dict[str, Tensor] = {}
    sums, sums_ahead = [], [torch.zeros(())] * ahead
    for document in documents:
        if len(document) < 2:
            continue
        ids, labels = document[None, :-1], document[None, 1:]
        alone = LossContext(labels_ahead_K=ahead_K)
        position = torch.arange(len(document) - 1)[None]
        loss = model(ids, position, None, labels=labels, losses=alone).sum()
        sums.append(loss.detach())
        for name, gradient in gradients(loss / predicted).items():
            want[name] = want.get(name, 0) + gradient
        sums_ahead = [a + b for a, b in zip(sums_ahead, alone.losses_ahead, strict=True)]

    torch.testing.assert_close(report["loss"], sum(sums) / predicted, rtol=2e-6, atol=0)
    torch.testing.assert_close(together.losses_ahead, sums_ahead, rtol=2e-6, atol=0)
    assert got.keys() == want.keys() == dict(model.named_parameters()).keys()
    for name, gradient in want.items():
        error = (got[name] - gradient).norm() / gradient.norm()
        assert gradient.norm() > 0 and error < 2e-5, f"{name}: relative error {error:.1e}"
    samples, labels = sample_losses(losses, predicted, mask)[2]["samples"]
    torch.testing.assert_close(samples[1], sums[4], rtol=2e-6, atol=0)
    assert labels.tolist() == mask.sum(1).tolist() and labels[1] == TOKENS

    whole = model(text[:, :-1], place, None, labels=text[:, 1:])
    assert (whole - losses.view(whole.shape))[mask].abs().max() > 0.1


@pytest.mark.parametrize(
    "overrides",
    [
        [*SMALL, "model.attention.kv_heads=2"],
        [*SMALL, *YARN, "model.attention.qk_norm=true", "model.bias=true"],
        [*TINY_GPT_OSS, TWO],
        *slow([*TINY_GPT_OSS, TWO, "run.recompute=full"]),
        [*MLA, *YARN],
        [*TINY_DEEPSEEK, TWO],
        [*TINY_DEEPSEEK, TWO, "run.recompute=attention"],
        [*SMALL, "model.mtp_layers=2", "model.mtp_loss=0.3"],
        TINY_QWEN3_NEXT,
        [*LINEAR, "run.recompute=full"],
    ],
    ids=[
        *("gqa", "yarn_norms_biases", "gpt_oss", "gpt_oss_recompute", "mla_yarn"),
        *("deepseek", "deepseek_recompute", "two_ahead", "qwen3_next", "linear_recompute"),
    ],
)
def test_documents_are_as_if_alone(overrides: list[str]) -> None:
    run_distributed(_packed_and_alone, 1, overrides)
