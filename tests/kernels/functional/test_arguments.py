"""Arguments of the public functions, wrong in every way: one line that names one, or a result."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.api import (
    Activation,
    GroupedMLP,
    Margins,
    grouped_experts,
    grouped_experts_sorted,
    resolve_backend,
    router_topk,
)
from phalanx.kernels.functional.options import FLOATS

T, D, F, E, K = 6, 8, 16, 4, 2
JUNK = (None, "x", 3, 2.5, -1, True, object(), [1.0], (1,), torch.nn.functional.silu)


def weights() -> dict[str, Tensor]:
    return dict(
        w1=torch.randn(E, 2 * F, D),
        w2=torch.randn(E, D, F),
        b1=torch.randn(E, 2 * F),
        b2=torch.randn(E, D),
    )


def of_tokens() -> dict[str, Any]:
    prob, idx = torch.rand(T, E).topk(K)
    return dict(x=torch.randn(T, D), topk_idx=idx, topk_prob=prob) | weights()


def of_rows() -> dict[str, Any]:
    counts = torch.tensor([1, 2, 0, 3])
    return dict(rows=torch.randn(T, D), counts=counts, row_prob=torch.rand(T)) | weights()


def of_router() -> dict[str, Any]:
    return dict(logits=torch.randn(T, E), top_k=2, bias=torch.zeros(E), score="sigmoid")


def of_choice() -> dict[str, Any]:
    w = weights()
    return dict(x=torch.randn(T, D), w1=w["w1"], w2=w["w2"], top_k=2)


def of_module() -> dict[str, Any]:
    return dict(experts=E, hidden=D, ffn=F, top_k=K)


Given = Callable[[], dict[str, Any]]
FUNCTIONS: dict[Callable[..., Any], tuple[Given, tuple[str, ...]]] = {
    grouped_experts: (
        of_tokens,
        ("activation", "backend", "recipe", "layout", "accumulate", "margins"),
    ),
    grouped_experts_sorted: (of_rows, ("activation", "backend", "recipe", "layout", "margins")),
    router_topk: (
        of_router,
        ("score", "softmax_over", "normalize", "scale", "groups", "group_topk", "backend"),
    ),
    resolve_backend: (of_choice, ("activation", "backend", "recipe", "layout")),
    GroupedMLP: (
        of_module,
        ("activation", "bias", "backend", "dtype", "recipe", "accumulate", "margins"),
    ),
}
"""Functions and modules, right arguments, and names of options."""
OTHERS = {"x": ("w1", "w2", "the input"), "rows": ("the input", "row_prob"), "logits": ("bias",)}
"""Arguments that a line may name too: one of two that do not fit is wrong, whichever it is."""
OTHERS |= {"w1": ("w2",), "b1": ("w1",), "b2": ("w2",), "topk_idx": ("topk_prob",)}


def wrong(value: Any) -> Iterator[Any]:
    """The value in other dtypes, shapes, layouts and devices, and things that are no tensors."""
    if isinstance(value, Tensor):
        others = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
        yield from (value.to(dtype) for dtype in (*FLOATS, *others))
        yield from (value.to("meta"), value[None], value[0], value.to_sparse(), value.tolist())
        for axis, size in enumerate(value.shape):
            yield from (value.narrow(axis, 0, size - 1), value.narrow(axis, 0, 0))
            yield torch.cat([value, value.narrow(axis, 0, 1)], axis)
        if value.ndim > 1:
            yield value.mT
    yield from JUNK


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_wrong_argument_is_one_line_that_names_it(function: Callable[..., Any]) -> None:
    given, options = FUNCTIONS[function]
    refused = 0
    function(**given())
    for name in (*given(), *options):
        for value in wrong(given().get(name)):
            try:
                function(**given() | {name: value})
            except (ValueError, TypeError) as error:
                line = str(error)
                assert "\n" not in line and len(line) < 220, (name, value, line)
                assert any(word in line for word in (name, *OTHERS.get(name, ()))), (name, line)
                refused += 1
    assert refused > 10 * len(options)


def test_a_device_that_does_not_exist_is_named() -> None:
    for device in ("gpu", 2.5, [1]):
        with pytest.raises(ValueError, match="^device=.* is unknown: use cuda, cpu or an"):
            GroupedMLP(E, D, F, K, device=device)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(w2=torch.randn(3, D, F)), "w2 has 3 experts, w1 has 4"),
        (dict(b1=torch.randn(5, 2 * F)), "b1 has 5 experts, w1 has 4"),
        (dict(x=torch.randn(T, 7)), "x has 7 channels, w1 and w2 have 8"),
        (dict(w1=torch.randn(E, 2 * F, 7)), "w1 reads 7 channels, x has 8"),
        (dict(w2=torch.randn(E, 9, F)), "w2 writes 9 channels, x has 8"),
        (dict(b2=torch.randn(E, 9)), "b2 has 9 channels, w2 has 8"),
        (
            dict(activation="squared_relu"),
            "w1 has 32 rows and w2 16 columns of an expert: activation=squared_relu needs as many "
            "rows as columns",
        ),
        (dict(w1=weights()["w1"].half()), "w1 is fp16, x is fp32: give them one dtype"),
        (dict(activation=torch.nn.SiLU()), "not SiLU; SiLU with a gate is swiglu"),
        (dict(activation=torch.nn.functional.gelu), "not gelu; gelu with a gate is geglu"),
        (dict(activation=torch.nn.functional.relu), "one of swiglu, geglu, quick_geglu"),
        (dict(margins=3), "margins must be a Margins, not 3"),
    ],
)
def test_the_argument_that_is_wrong_is_blamed(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        grouped_experts(**of_tokens() | changed)
    assert message in str(error.value)


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_functions_take_the_same_dtypes(dtype: torch.dtype) -> None:
    """Results are those of fp64 but for roundings; probabilities and scores are used in fp32."""
    torch.manual_seed(0)
    tokens, rows, router = of_tokens(), of_rows(), of_router()

    def cast(given: dict[str, Any], to: torch.dtype) -> dict[str, Any]:
        floats = {
            name: value.to(dtype).to(to)
            for name, value in given.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return given | floats

    tolerance = {torch.bfloat16: 0.1, torch.float16: 1e-2}.get(dtype, 1e-4)
    close = dict(rtol=tolerance, atol=tolerance)
    for function, given in ((grouped_experts, tokens), (grouped_experts_sorted, rows)):
        got = function(**cast(given, dtype))
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), function(**cast(given, torch.float64)), **close)
    assert resolve_backend(tokens["x"].to(dtype), tokens["w1"], tokens["w2"], 2).backend
    logits = router["logits"].to(dtype).requires_grad_()
    idx, prob = router_topk(logits, 2)
    want = logits.detach().double().softmax(-1).gather(1, idx.long())
    torch.testing.assert_close(prob.double(), want, rtol=1e-5, atol=1e-6)
    prob.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == dtype
    module = GroupedMLP(E, D, F, K, dtype=dtype)
    assert module(tokens["x"].to(dtype), tokens["topk_idx"], tokens["topk_prob"]).dtype == dtype


def test_constants_are_numbers() -> None:
    for name in ("alpha", "limit", "offset"):
        with pytest.raises(ValueError, match=f"^{name} must be a number, not 'x'$"):
            Activation("swiglu", **{name: "x"})
    with pytest.raises(ValueError, match="^2.5 SMs cannot be left free: set kernels.sm_margin.fo"):
        Margins(2.5)


def test_a_module_has_parameters_in_one_layout() -> None:
    with pytest.raises(ValueError, match=r"^layout= is an option of functions, for weights that"):
        GroupedMLP(E, D, F, K, layout="transposed")
