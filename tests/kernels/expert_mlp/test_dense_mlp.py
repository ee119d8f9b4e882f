"""Dense MLPs and shared experts through the grouped kernels: one group of all rows."""

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.dense_mlp import dense_fc1, dense_fc2
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from tests.kernels.problems import ACTIVATIONS, error, formula, one_expert
from tests.support.sync_free import sync_free

D, WIDTH = 32, 24


def tensors(act: Activation, bias: bool, rows: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (rows, D), "w1": (act.width(WIDTH), D), "w2": (D, WIDTH)}
    if bias:
        shapes |= {"b1": (act.width(WIDTH),), "b2": (D,)}
    return {k: torch.randn(s, generator=g) * (0.2 if k[0] == "w" else 1) for k, s in shapes.items()}


def whole_mlp(given: dict[str, torch.Tensor], spec: MLPSpec) -> torch.Tensor:
    weights = MLPWeights(*(given.get(name) for name in ("w1", "w2", "b1", "b2")))
    return one_expert(given["x"], weights, spec)


def plain(given: dict[str, torch.Tensor], act: Activation) -> torch.Tensor:
    h = F.linear(given["x"], given["w1"], given.get("b1"))
    wide = torch.promote_types(h.dtype, torch.float32)
    return F.linear(formula(h.to(wide), act).to(h.dtype), given["w2"], given.get("b2"))


def cast(given: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {k: v.to(dtype).requires_grad_() for k, v in given.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_equals_two_linear_layers(
    act: Activation, bias: bool, backend: str, dtype: torch.dtype
) -> None:
    given = {k: v.to(dtype) for k, v in tensors(act, bias, 21).items()}
    dout = torch.randn(21, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaves, same, exact = cast(given, dtype), cast(given, dtype), cast(given, torch.float64)
    ours = with_gradients(whole_mlp(leaves, MLPSpec(act, backend)), dout, leaves)
    torchs = with_gradients(plain(same, act), dout, same)
    want = with_gradients(plain(exact, act), dout.double(), exact)
    for name, got, other, true in zip(["out", *given], ours, torchs, want, strict=True):
        assert got.shape == true.shape and got.dtype == dtype
        assert error(got, true) <= 2 * error(other, true), name


def with_gradients(
    out: torch.Tensor, dout: torch.Tensor, leaves: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout)]


@pytest.mark.parametrize("rows", [0, 1, 30])
def test_any_number_of_rows(rows: int) -> None:
    act = Activation("swiglu")
    leaves = cast(tensors(act, True, rows), torch.float32)
    with sync_free():
        out = whole_mlp(leaves, MLPSpec(act, "torch"))
        out.sum().backward()
    assert out.shape == (rows, D)
    assert leaves["b2"].grad.tolist() == [rows] * D


def test_x_and_h_are_saved() -> None:
    act, saved = Activation("swiglu"), {}
    leaves = cast(tensors(act, True, 50), torch.bfloat16)
    weights = {leaves[k].data_ptr() for k in ("w1", "w2", "b1", "b2")}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = whole_mlp(leaves, MLPSpec(act, "torch"))
    assert out.requires_grad
    assert sum(n for p, n in saved.items() if p not in weights) == 2 * 50 * (D + 2 * WIDTH) + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 21])
def test_halves_are_the_whole_bit_for_bit(
    rows: int, act: Activation, backend: str, dtype: torch.dtype
) -> None:
    given = tensors(act, False, rows)
    whole, parts = cast(given, dtype), cast(given, dtype)
    dout = torch.randn(rows, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    spec = MLPSpec(act, backend)
    made = dense_fc2(dense_fc1(parts["x"], parts["w1"], spec), parts["w2"], spec)
    expected = with_gradients(whole_mlp(whole, spec), dout, whole)
    for got, want in zip(with_gradients(made, dout, parts), expected, strict=True):
        assert torch.equal(got, want)


def test_halves_add_to_buffers() -> None:
    act = Activation("swiglu")
    leaves = cast(tensors(act, False, 5), torch.bfloat16)
    plain_leaves = cast(tensors(act, False, 5), torch.bfloat16)
    spec = MLPSpec(act, "torch", accumulate=True)
    for name in ("w1", "w2"):
        leaves[name].main_grad = torch.ones(leaves[name].shape)
        leaves[name].grad_added_to_main_grad = False
    x, w1, w2 = (leaves[name] for name in ("x", "w1", "w2"))
    dense_fc2(dense_fc1(x, w1, spec), w2, spec).sum().backward()
    whole_mlp(plain_leaves, MLPSpec(act, "torch")).sum().backward()
    for name in ("w1", "w2"):
        assert leaves[name].grad_added_to_main_grad
        assert torch.equal(leaves[name].main_grad, 1 + plain_leaves[name].grad.float())


def test_halves_that_do_not_fit() -> None:
    spec = MLPSpec(Activation("swiglu"), "torch")
    x, w1 = torch.zeros(3, 8), torch.zeros(6, 8)
    with pytest.raises(ValueError, match=r"expected x \[N, D\] and w1 \[H, D\]"):
        dense_fc1(x, torch.zeros(6, 9), spec)
    first = dense_fc1(x, w1, spec)
    with pytest.raises(ValueError, match=r"expected a \[N, F\] and w2 \[D, F\]"):
        dense_fc2(first, torch.zeros(8, 4), spec)
