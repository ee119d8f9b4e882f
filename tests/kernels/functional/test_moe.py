"""`MoE`: the whole layer against loops in fp64, its losses against transformers, its bias."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.kernels.api import MoE, SortedRows, experts, register_flops

D, WIDTH, E, K = 32, 48, 8, 2
DEEPSEEK = {"score": "sigmoid", "normalize": True, "scale": 2.5, "groups": 4, "group_topk": 2}


def swiglu(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ w1.T).chunk(2, -1)
    return (F.silu(gate) * up) @ w2.T


def by_loops(layer: MoE, x: torch.Tensor, *, sigmoid: bool) -> torch.Tensor:
    """Tokens one after the other, of a router without groups, in the dtype of x."""
    state = {name: value.to(x.dtype) for name, value in layer.state_dict().items()}
    rows = []
    for token in x.flatten(0, -2):
        logits = state["router.weight"] @ token
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        chosen = (scores + state.get("router.bias", 0)).topk(K).indices
        prob = scores[chosen] / (scores[chosen].sum() if sigmoid else 1)
        w1, w2 = state["experts.w1"][chosen], state["experts.w2"][chosen]
        row = sum(p * swiglu(token, a, b) for p, a, b in zip(prob, w1, w2, strict=True))
        if "shared.w1" in state:
            shared = swiglu(token, state["shared.w1"][0], state["shared.w2"][0])
            if "shared_gate" in state:
                shared = shared * (state["shared_gate"][0] @ token).sigmoid()
            row = row + shared
        rows.append(row)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize(
    "shared", [{}, {"shared_ffn": 24}, {"shared_ffn": 24, "shared_gate": True}]
)
@pytest.mark.parametrize("sigmoid", [False, True], ids=["softmax", "sigmoid"])
def test_the_layer_is_what_loops_compute(sigmoid, shared):
    torch.manual_seed(0)
    chosen = dict(router={"score": "sigmoid", "normalize": True}, bias_rate=0.1) if sigmoid else {}
    layer = MoE(D, WIDTH, E, K, dtype=torch.float64, **chosen, **shared)
    with torch.no_grad():
        if layer.shared_gate is not None:
            nn.init.normal_(layer.shared_gate)
        if sigmoid:
            layer.router.bias.copy_(torch.randn(E))
    x = torch.randn(3, 7, D, dtype=torch.float64)
    out, losses = layer(x)
    # Logits and probabilities are in fp32.
    torch.testing.assert_close(out, by_loops(layer, x, sigmoid=sigmoid), rtol=1e-5, atol=1e-6)
    assert losses == {}


def test_losses_are_those_of_transformers():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(1)
    layer = MoE(D, WIDTH, E, K, aux_coef=0.5, z_coef=0.25)
    x = torch.randn(64, D)
    _, losses = layer(x)
    logits = x @ layer.router.weight.T
    theirs = mixtral.load_balancing_loss_func((logits,), E, K)  # of the choices, not of their share
    torch.testing.assert_close(losses["aux"], 0.5 * theirs / K)
    torch.testing.assert_close(losses["z"], 0.25 * logits.logsumexp(-1).square().mean())
    (grad,) = torch.autograd.grad(sum(losses.values()), layer.router.weight)
    (want,) = torch.autograd.grad(
        0.5 * theirs / K + 0.25 * logits.logsumexp(-1).square().mean(), layer.router.weight
    )
    torch.testing.assert_close(grad, want)


def test_nothing_is_counted_or_lost_outside_training():
    layer = MoE(D, WIDTH, E, K, aux_coef=0.1, bias_rate=0.1, router=DEEPSEEK)
    x = torch.randn(9, D)
    with torch.no_grad():
        assert layer(x)[1] == {}
    layer.eval()
    assert layer(x)[1] == {} and not layer.router.counts.any()
    assert "aux" in layer.train()(x)[1] and layer.router.counts.sum() == 9 * K


def test_the_bias_evens_the_load():
    torch.manual_seed(2)
    layer = MoE(D, WIDTH, E, K, bias_rate=0.01, router={"score": "sigmoid", "normalize": True})
    x = torch.randn(256, D) + torch.randn(D)  # tokens that have much in common

    def spread() -> int:
        layer(x)
        counts = layer.router.counts.clone()
        layer.update_bias()
        return int(counts.max() - counts.min())

    first = layer.router.bias.clone()
    before = spread()
    moved = layer.router.bias - first
    assert moved.abs().max() == pytest.approx(0.01) and (moved > 0).any() and (moved < 0).any()
    for _ in range(80):
        after = spread()
    assert after < before / 3


def test_a_cast_leaves_the_bias_in_fp32():
    layer = MoE(D, WIDTH, E, K, bias_rate=1e-3, router=DEEPSEEK).bfloat16()
    assert layer.router.bias.dtype == torch.float32 and layer.router.weight.dtype == torch.bfloat16
    assert layer(torch.randn(5, D, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_every_parameter_learns():
    torch.manual_seed(3)
    layer = MoE(D, WIDTH, E, K, aux_coef=0.01, shared_ffn=16, shared_gate=True, bias=True)
    out, losses = layer(torch.randn(64, D, requires_grad=True))
    (out.square().mean() + sum(losses.values())).backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(activation="silu"), ValueError, "silu with a gate is swiglu"),
        (dict(activation="gelu"), ValueError, "gelu with a gate is geglu"),
        (dict(bias_rate=1e-3), ValueError, "bias_rate is for router={'score': 'sigmoid'}"),
        (dict(aux_coef=-1.0), ValueError, "aux_coef must be a number from 0 on, not -1.0"),
        (dict(shared_gate=True), ValueError, "set shared_ffn"),
        (dict(router={"groups": 3}), ValueError, "groups=3"),
        (dict(router={"scores": 1}), TypeError, "scores is no option of router_topk"),
        (dict(layers=3), TypeError, "layers is no option of experts"),
        (dict(top_k=9), ValueError, "top_k at most experts"),
    ],
)
def test_errors_name_the_argument(given, error, message):
    with pytest.raises(error, match=message):
        MoE(**{**dict(hidden=D, ffn=WIDTH, num_experts=E, top_k=K), **given})


def test_errors_of_calls():
    layer = MoE(D, WIDTH, E, K)
    with pytest.raises(ValueError, match=r"expected x \[..., 32\], not \[4, 31\]"):
        layer(torch.randn(4, 31))
    with pytest.raises(ValueError, match="set bias_rate"):
        layer.update_bias()


def test_ends_are_counts():
    weights = torch.randn(E, 2 * WIDTH, D), torch.randn(E, D, WIDTH)
    counts = torch.tensor([3, 0, 5, 1, 0, 2, 4, 1])
    rows, prob = torch.randn(20, D), torch.rand(20)
    ends = experts(rows, SortedRows.of_ends(counts.cumsum(0), prob), weights)
    assert torch.equal(ends, experts(rows, SortedRows(counts, prob), weights)) and ends[:16].all()
    listed, _ = SortedRows.of_ends(counts.cumsum(0).tolist())
    assert listed.tolist() == counts.tolist()


def test_the_flop_counter_counts_the_products():
    register_flops()
    layer, x = MoE(D, WIDTH, E, K), torch.randn(10, D)
    of_a_row = 2 * 3 * D * WIDTH
    with FlopCounterMode(display=False) as counter:
        out, _ = layer(x)
        forward = counter.get_total_flops()
        out.sum().backward()
    router = 2 * 10 * D * E
    assert forward == 10 * K * of_a_row + router
    # Of x there is no gradient: fc1 has one product backward, fc2 two.
    assert counter.get_total_flops() - forward == 10 * K * 2 * (2 + 2) * D * WIDTH + router


def test_a_call_without_tokens_has_losses_of_nothing() -> None:
    layer = MoE(64, 32, 8, 2, aux_coef=0.1, z_coef=0.1, shared_ffn=16)
    out, losses = layer(torch.randn(2, 0, 64))
    assert out.shape == (2, 0, 64) and [*losses] == ["aux", "z"]
    (out.sum() + sum(losses.values())).backward()
    assert not any(loss.item() for loss in losses.values())
    assert not layer.router.weight.grad.any()  # type: ignore[union-attr]
