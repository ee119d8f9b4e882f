"""Linear attention of ranks that share sequences, and tensor ranks, against that of one rank.

Outputs, and the gradients of the input and of every parameter: of those that ranks share, summed
over them.

Legend: B sequences, S tokens, D hidden, V value heads.
"""

import functools
from typing import Any, NamedTuple

import megatron.core.distributed  # noqa: F401  (imported once for all ranks, which are forked)
import pytest
import torch
from torch import Tensor

from tests.moe.cases import install
from tests.moe.model.test_features import draw
from tests.support.distributed import run_distributed
from tests.support.sync_free import sync_free

pytestmark = pytest.mark.dist

B, S, HIDDEN, KEYS, VALUES, D = 2, 96, 16, 4, 8, 128
QKV = [KEYS * D, KEYS * D, VALUES * D]
PARAMETERS: dict[str, tuple[tuple[int, ...], int, list[int]]] = {
    "in_proj.weight": (
        (sum(QKV) + VALUES * (D + 2), HIDDEN),
        0,
        [*QKV, VALUES * D, VALUES, VALUES],
    ),
    "conv1d.weight": ((sum(QKV), 1, 4), 0, QKV),
    "dt_bias": ((VALUES,), 0, [VALUES]),
    "A_log": ((VALUES,), 0, [VALUES]),
    "out_norm.weight": ((D,), 0, []),
    "out_proj.weight": ((HIDDEN, VALUES * D), 1, [VALUES * D]),
}
"""Shape of the whole, the dimension that tensor ranks cut, and the sections that each is cut in."""
DOCUMENTS = ((0, 5, 12, 13, 50, 95), (0, 47, 48, 71))
"""Starts of documents: inside chunks and at their ends, of one token and over several chunks."""
BOUND = 2e-6
"""Relative norm of a difference: sums of some hundred fp32 terms in another order."""


class Result(NamedTuple):
    """Results of a rank, in its order of tokens."""

    out: Tensor
    grads: dict[str, Tensor]


def cut(whole: Tensor, name: str, ranks: int, rank: int) -> Tensor:
    """A tensor rank's part of a parameter, or of its gradient."""
    _, dim, sections = PARAMETERS[name]
    parts = (
        [part.chunk(ranks, dim)[rank] for part in whole.split(sections, dim)] if sections else []
    )
    return torch.cat(parts, dim) if parts else whole


def tokens_of(ranks: int, rank: int) -> Tensor:
    """Places in a sequence of the tokens of a context rank: chunks from both of its ends."""
    chunks = torch.arange(S).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def positions() -> Tensor:
    place_BS = torch.zeros(B, S, dtype=torch.int64)
    for row, begins in zip(place_BS, DOCUMENTS, strict=True):
        for first, end in zip(begins, (*begins[1:], S), strict=True):
            row[first:end] = torch.arange(end - first)
    return place_BS


def own(x_SBD: Tensor, mask: bool, context: tuple[int, int], tensor: tuple[int, int]) -> Tensor:
    """A rank's part of hidden states; packed, sequences lie behind each other."""
    x = x_SBD[tokens_of(*context)]
    x = x.transpose(0, 1).reshape(1, -1, HIDDEN).transpose(0, 1) if mask else x
    return x.chunk(tensor[0])[tensor[1]]


def _results(tensor: int, context: int) -> list[Result]:
    """Results of this rank, without and with packed documents."""
    install()
    from megatron.core.transformer.spec_utils import build_module

    from phalanx.configs.load import load
    from phalanx.extras.linear_attention.gated_delta_net import spec
    from phalanx.moe.model.megatron_config import Layout, transformer_config
    from phalanx.moe.model.packed import packed
    from phalanx.parallel.groups import create

    groups = create(tensor=tensor, context=context)
    at, rank = (context, groups.pg.cp.rank()), (tensor, groups.pg.tp.rank())
    heads = f"{{full_attention_interval: 2, key_heads: {KEYS}, value_heads: {VALUES}}}"
    cfg = load(
        [
            "model=tiny",
            "precision=fp32",
            f"model.hidden={HIDDEN}",
            f"model.linear_attention={heads}",
        ]
    )
    config = transformer_config(cfg, Layout(tensor=tensor, context=context), on_cpu=True)
    layer: Any = build_module(spec("torch"), config=config, layer_number=1, pg_collection=groups.pg)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            shape = PARAMETERS[name][0]
            value = draw(shape, name) / (HIDDEN**0.5 if "proj" in name else 2)
            parameter.copy_(cut(value, name, *rank))
    results = []
    for mask in (False, True):
        documents = None
        if mask:
            whole_BS = positions()
            place_BS = whole_BS[:, tokens_of(*at)]
            last_BS = (whole_BS.roll(-1, 1) == 0)[:, tokens_of(*at)]
            more = dict(whole_BS=whole_BS, last_BS=last_BS) if context > 1 else {}
            documents = packed(place_BS, places=0, ranks=context, **more)
        layer.zero_grad()
        x = own(draw((S, B, HIDDEN), "input"), mask, at, rank).clone().requires_grad_()
        with sync_free():
            out, bias = layer(x, packed_seq_params=documents)
            out.backward(own(draw((S, B, HIDDEN), "gradient"), mask, at, rank))
        assert bias is None and out.shape == x.shape
        named = {n: p.grad.clone() for n, p in layer.named_parameters()}
        results.append(Result(out.detach(), {"input": x.grad, **named}))
    return results


@functools.cache
def results_of(tensor: int, context: int) -> list[list[Result]]:
    """Results of each rank."""
    return run_distributed(_results, tensor * context, tensor, context)


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    error = (found - wanted).norm() / wanted.norm()
    assert wanted.norm() > 0 and error < BOUND, f"{what}: relative error {error:.1e}"


def whole_input(x: Tensor, mask: bool) -> Tensor:
    """[S, B, D] of one rank's."""
    return x.view(B, S, HIDDEN).transpose(0, 1) if mask else x


@pytest.mark.parametrize(("tensor", "context"), [(1, 2), (1, 4), (2, 2)])
def test_ranks_that_share_sequences_are_one(tensor: int, context: int) -> None:
    ranks, (alone,) = results_of(tensor, context), results_of(1, 1)
    assert not torch.allclose(alone[0].out, whole_input(alone[1].out, True), atol=1e-2)
    for mask, want in zip((False, True), alone, strict=True):
        sums: dict[tuple[str, int], Tensor] = {}
        for i, results in enumerate(ranks):
            got, at, rank = results[mask], (context, i // tensor), (tensor, i % tensor)
            pairs = {
                "output": (got.out, want.out),
                "input": (got.grads["input"], want.grads["input"]),
            }
            for what, (found, wanted) in pairs.items():
                close(found, own(whole_input(wanted, mask), mask, at, rank), what)
            for name, (_, _, sections) in PARAMETERS.items():
                key = name, rank[1] if sections else 0  # all ranks have the same norm
                sums[key] = sums.get(key, torch.zeros(())) + got.grads[name]
        for (name, part), found in sums.items():
            close(found, cut(want.grads[name], name, tensor, part), name)


def test_heads_of_other_ranks_have_no_gradient() -> None:
    """Each of two context ranks has the gradients of half of the heads: none counts twice."""
    for results in results_of(1, 2):
        for name in ("A_log", "dt_bias"):
            assert (results[0].grads[name] != 0).sum() == VALUES // 2
