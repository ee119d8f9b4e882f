"""Hyper-connections against loops over tokens and streams in fp64."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.extras.variants.hyper_connections import (
    ITERATIONS,
    HyperConnection,
    sinkhorn,
    write,
)
from tests.moe.cases import draw, fill, install
from tests.support.distributed import run_distributed

TOKENS, HIDDEN = 5, 6


def plain_sinkhorn(logits_nn: Tensor, iterations: int) -> Tensor:
    n = len(logits_nn)
    matrix = [[logits_nn[i, j].exp() for j in range(n)] for i in range(n)]
    for _ in range(iterations):
        columns = [sum(matrix[i][j] for i in range(n)) for j in range(n)]
        matrix = [[matrix[i][j] / columns[j] for j in range(n)] for i in range(n)]
        rows = [sum(matrix[i]) for i in range(n)]
        matrix = [[matrix[i][j] / rows[i] for j in range(n)] for i in range(n)]
    return torch.stack([torch.stack(row) for row in matrix])


@pytest.mark.parametrize("n", [2, 4])
def test_sinkhorn_and_its_gradient_are_those_of_a_loop(n: int) -> None:
    logits = draw(3, n, n, seed=n, scale=2.0, dtype=torch.float64).requires_grad_()
    upstream = draw(3, n, n, seed=9, dtype=torch.float64)
    results = []
    for compute in (sinkhorn, lambda x: torch.stack([plain_sinkhorn(m, ITERATIONS) for m in x])):
        out = compute(logits)
        (grad,) = torch.autograd.grad(out, logits, upstream)
        results.append((out.detach(), grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_matrices_are_doubly_stochastic_and_extreme_logits_give_numbers() -> None:
    matrix = sinkhorn(draw(64, 4, 4, seed=1))
    for dim in (-1, -2):
        torch.testing.assert_close(matrix.sum(dim), torch.ones(64, 4), rtol=0, atol=1e-4)
    assert matrix.min() >= 0
    logits = (draw(64, 4, 4, seed=2) * 300).requires_grad_()
    out = sinkhorn(logits)
    out.square().sum().backward()
    assert out.isfinite().all() and logits.grad.isfinite().all()  # type: ignore[union-attr]
    torch.testing.assert_close(out.sum(-1), torch.ones(64, 4))


def connection(n: int, dtype: torch.dtype = torch.float64) -> HyperConnection:
    config: Any = SimpleNamespace(
        **dict(layernorm_epsilon=1e-5, hidden_size=HIDDEN, params_dtype=dtype),
        perform_initialization=False,
    )
    install()
    built = HyperConnection(config, n)
    fill(built, 0.7)
    return built


def statement(c: HyperConnection, x_TnD: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """Streams after a sublayer, token by token."""
    n, rows = c.streams, []
    for x_nD in x_TnD:
        flat = x_nD.flatten()
        normed = flat / (flat.square().mean() + c.eps).sqrt()
        logits = [c.phi[i] @ normed for i in range(n * (n + 2))]
        read = [(c.scale[0] * logits[i] + c.offset[i]) for i in range(n)]
        read = [1 / (1 + (n - 1) * (-value).exp()) for value in read]  # 1 / n at 0
        after = [2 * (c.scale[1] * logits[n + i] + c.offset[n + i]).sigmoid() for i in range(n)]
        mixing = [c.scale[2] * logits[i] + c.offset[i] for i in range(2 * n, n * (n + 2))]
        away = 4.0 * (1 - torch.eye(n, dtype=torch.float64))
        mix = plain_sinkhorn(torch.stack(mixing).view(n, n) - away, ITERATIONS)
        out = sublayer(sum(read[j] * x_nD[j] for j in range(n)))  # type: ignore[arg-type]
        new = [sum(mix[i, j] * x_nD[j] for j in range(n)) + after[i] * out for i in range(n)]
        rows.append(torch.stack(new))  # type: ignore[arg-type]
    return torch.stack(rows)


@pytest.mark.parametrize("n", [2, 4])
def test_a_connection_and_its_gradients_are_their_statement(n: int) -> None:
    c, results = connection(n), []
    x = draw(TOKENS, n, HIDDEN, seed=3, dtype=torch.float64).requires_grad_()
    matrix = draw(HIDDEN, HIDDEN, seed=4, dtype=torch.float64)

    def ours(x_TnD: Tensor) -> Tensor:
        read, *how = c(x_TnD)
        return write(x_TnD, (read @ matrix).tanh(), *how)

    for compute in (ours, partial(statement, c, sublayer=lambda x: (x @ matrix).tanh())):
        out = compute(x)
        upstream = draw(*out.shape, seed=5, dtype=torch.float64)
        grads = torch.autograd.grad(out, [x, *c.parameters()], upstream)
        results.append([out.detach(), *grads])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_bf16_streams_keep_coefficients_in_fp32() -> None:
    wide, narrow = connection(4), connection(4, torch.bfloat16)
    wide.load_state_dict(narrow.state_dict())
    x = draw(64, 4, HIDDEN, seed=6, dtype=torch.bfloat16)
    for got, want in zip(
        narrow.mappings(x.flatten(1)), wide.mappings(x.double().flatten(1)), strict=True
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_saved_bytes_are_those_of_the_estimate() -> None:
    from phalanx.configs.load import load
    from phalanx.extras.variants.facts import HyperConnections
    from phalanx.moe.saved_tensors import TokenCounts

    c, n, tokens = connection(4, torch.bfloat16), 4, 256
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x = draw(tokens, n, HIDDEN, seed=7, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        read, *how = c(x)
        held = write(x, read * 2, *how)
    assert held.shape == x.shape
    cfg = load(["model=tiny", f"model.hidden={HIDDEN}", "model.variants=[mhc:4]"])
    estimate = HyperConnections(n).saved_bytes(cfg, TokenCounts(tokens, tokens, 0, 0, 0), True)
    assert sum(storages.values()) == pytest.approx(estimate / 2, rel=0.03)


SMALL = [
    *["model=tiny", "model.layers=3", "model.hidden=32", "model.attention.head_dim=8"],
    *["model.dense_ffn=48", "model.moe.ffn=16", "model.vocab_size=64", "precision=fp32"],
    *["model.moe.dense_layers=1", "model.moe.shared_ffn=16", "data.sequence_length=16"],
]


def _of_model(equal: bool) -> tuple[Tensor, Tensor]:
    """Losses of a model with and without streams; or of streams, and of their statement."""
    from tests.moe.model.test_features import built, tokens

    losses = []
    for variants in ("[]", "[mhc:4]"):
        cfg, model = built([*SMALL, f"model.variants={variants}"])
        hyper = [m for m in model.modules() if isinstance(m, HyperConnection)]
        assert len(hyper) == (6 if variants != "[]" else 0)
        torch.manual_seed(0)
        for name, p in model.named_parameters():
            if "hyper" not in name:
                torch.nn.init.normal_(p, 0, 0.3) if p.dim() > 1 else torch.nn.init.ones_(p)
        for each in hyper:
            with torch.no_grad():
                each.offset.zero_()
                each.phi.normal_()
                each.scale.fill_(0.0 if equal else 0.5)
        ids, labels = tokens(cfg.model.vocab_size)
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        loss = model(input_ids=ids, position_ids=places, attention_mask=None, labels=labels)
        losses.append(loss.detach())
    return losses[0], losses[1]


@pytest.mark.dist
def test_equal_streams_are_one_residual() -> None:
    ((plain, streams),) = run_distributed(_of_model, 1, True)
    torch.testing.assert_close(streams, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.dist
def test_other_streams_are_not() -> None:
    ((plain, streams),) = run_distributed(_of_model, 1, False)
    assert (streams - plain).abs().max() > 1e-2


def _of_layers() -> None:
    """Three layers as a whole against connections around their own attention and MLPs."""
    from tests.moe.model.test_features import built, fill, tokens

    cfg, model = built([*SMALL, "model.variants=[mhc:4]"])
    fill(model)
    seen: dict[str, Any] = {}

    def keep(module: Any, given: Any, named: Any, out: Any) -> None:
        seen.setdefault(f"in{module.layer_number}", named.get("hidden_states", *given[:1]).detach())
        seen[f"out{module.layer_number}"] = out[0].detach()
        seen[f"attend{module.layer_number}"] = {
            k: named[k]
            for k in ("attention_mask", "rotary_pos_emb", "packed_seq_params")
            if k in named
        }

    layers = model.decoder.layers
    for layer in layers:
        layer.register_forward_hook(keep, with_kwargs=True)
    ids, labels = tokens(cfg.model.vocab_size)
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    model(input_ids=ids, position_ids=places, attention_mask=None, labels=labels)
    x_SBD = seen["in1"]
    streams = [x_SBD] * 4
    for layer in layers:
        for c, norm, sublayer in (
            (
                layer.attention_hyper,
                layer.input_layernorm,
                partial(layer.self_attention, **seen[f"attend{layer.layer_number}"]),
            ),
            (layer.mlp_hyper, layer.pre_mlp_layernorm, layer.mlp),
        ):
            x_TnD = torch.stack([x.flatten(0, 1) for x in streams], 1)
            read, after, mix = c.mappings(x_TnD.flatten(1))
            shape = (*x_SBD.shape[:2], 1)
            x = sum(read[:, j].view(shape) * streams[j] for j in range(4))
            out, bias = sublayer(norm(x)[0])
            assert bias is None
            streams = [
                sum(mix[:, i, j].view(shape) * streams[j] for j in range(4))
                + after[:, i].view(shape) * out
                for i in range(4)
            ]
    mean = torch.stack(streams).mean(0)
    torch.testing.assert_close(seen["out3"], mean, rtol=1e-4, atol=1e-5)


@pytest.mark.dist
def test_layers_connect_attention_and_mlp_by_streams() -> None:
    run_distributed(_of_layers, 1)
