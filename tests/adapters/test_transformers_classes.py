"""All classes of experts of transformers: the same values and gradients, or a refusal by name."""

import copy
import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

import phalanx.adapters.transformers
from tests.adapters.hf_classes import EXPERTS, HIDDEN, decorated, experts

CLASSES = decorated()
KNOWN = "5.23.0"
REFUSED = {
    "DiffusionGemmaTextExperts": "activation",  # GELU by tanh
    "Gemma4TextExperts": "activation",
    "Inkling2Experts": "activation",  # soft cap
    "MuseSparkExperts": "norm",
}


def run(module: Any, x: Tensor, idx: Tensor, prob: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output, and gradients of x, of the probabilities and of all parameters."""
    leaves = [x.clone().requires_grad_(), prob.clone().requires_grad_(), *module.parameters()]
    out = module(leaves[0], idx, leaves[1])
    return out, list(torch.autograd.grad(out.square().sum(), leaves))


def routing(tokens: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids of which expert 1 is none, and probabilities."""
    generator = torch.Generator().manual_seed(tokens)
    order = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(-1)[:, :k]
    prob = torch.rand(tokens, k, generator=generator)
    return torch.randn(tokens, HIDDEN, generator=generator), order + (order > 0), prob


@pytest.mark.parametrize("name", CLASSES)
def test_values_and_gradients_of_every_class(name: str) -> None:
    ours = experts(CLASSES[name], name, "phalanx")
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"^{name}: phalanx does not .*{REFUSED[name]}"):
            phalanx.adapters.transformers.prepare(ours)
        return
    theirs = copy.deepcopy(ours)
    theirs.config._experts_implementation = "eager"
    try:
        phalanx.adapters.transformers.prepare(ours)
    except ValueError as refusal:
        if transformers.__version__ == KNOWN:
            raise
        pytest.skip(f"a class of a later release: {refusal}")
    converted = copy.deepcopy(ours)
    both = [ours, converted] if phalanx.adapters.transformers.convert(converted) else [ours]
    for tokens, k in ((33, 2), (7, 1), (1, 3)):
        want = run(theirs, *routing(tokens, k))
        for module in both:
            got = run(module, *routing(tokens, k))
            close(got[0], want[0])
            for grad, other in zip(_in_their_layout(module, got[1]), want[1], strict=True):
                close(grad, other)


def close(got: Tensor, want: Tensor) -> None:
    """Equal in fp32, but for the order of sums."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * (1 + want.abs().max().item()))


def _in_their_layout(module: Any, grads: list[Tensor]) -> list[Tensor]:
    """Gradients of parameters as a state dict would have them."""
    names = [name for name, _ in module.named_parameters()]
    state = dict(zip(names, grads[2:], strict=True))
    for hook in module._state_dict_hooks.values():
        hook(module, state, "", {})
    return [*grads[:2], *(state[name] for name in names)]


def test_most_classes_are_known() -> None:
    """A later release may add classes, which this does not forbid."""
    assert len(CLASSES) >= 65 and REFUSED.keys() <= CLASSES.keys()


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts"])
def test_ids_of_padding_add_nothing(name: str) -> None:
    """transformers marks slots of other ranks by the number of local experts, and padding by -1."""
    module = experts(CLASSES[name], name, "phalanx")
    x, idx, prob = routing(9, 3)
    is_none = torch.rand(idx.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    is_none[2] = True
    want, want_grads = run(module, x, idx, prob.masked_fill(is_none, 0.0))
    for none in (EXPERTS, -1):
        got, grads = run(module, x, idx.masked_fill(is_none, none), prob)
        close(got, want)
        assert (grads[1][is_none] == 0).all()
        for grad, other in zip(grads[2:], want_grads[2:], strict=True):
            close(grad, other)


def test_no_tokens() -> None:
    module = experts(CLASSES["Qwen3MoeExperts"], "Qwen3MoeExperts", "phalanx")
    out, grads = run(module, *routing(0, 2))
    assert out.shape == (0, HIDDEN)
    assert all((grad == 0).all() for grad in grads)


def up_before_gate(module: Any, h: Tensor) -> Tensor:
    up, gate = h.chunk(2, -1)
    return module.act_fn(gate) * up


def test_a_gate_is_recognised_by_its_values() -> None:
    module = experts(CLASSES["Qwen3MoeExperts"], "Qwen3MoeExperts", "phalanx")
    module._apply_gate = lambda h: up_before_gate(module, h)
    with pytest.raises(ValueError, match=r"^Qwen3MoeExperts: phalanx does not know the activation"):
        module(*routing(3, 2))


@pytest.mark.parametrize("limit", [1.0, 7.0])
def test_constants_of_a_gate_are_used(limit: float) -> None:
    module = experts(CLASSES["HYV4Experts"], "HYV4Experts", "phalanx")
    module.swiglu_limit = limit
    theirs = copy.deepcopy(module)
    theirs.config._experts_implementation = "eager"
    x, idx, prob = routing(20, 2)
    torch.testing.assert_close(module(9 * x, idx, prob), theirs(9 * x, idx, prob))


def test_classes_with_another_layout_are_those_of_the_docs() -> None:
    others = set[str]()
    for name in CLASSES.keys() - REFUSED.keys():
        try:
            if phalanx.adapters.transformers.convert(experts(CLASSES[name], name, "phalanx")):
                others.add(name)
        except ValueError:  # a class that only a newer transformers has may be refused
            assert transformers.__version__ != KNOWN
    assert others >= {"GptOssExperts", "AriaExperts", "OpenAIPrivacyFilterExperts"}
    assert transformers.__version__ != KNOWN or len(others) == 3


def test_weights_that_were_not_prepared_are_read_as_they_are() -> None:
    module = experts(CLASSES["GptOssExperts"], "GptOssExperts", "phalanx")
    before = {name: p.shape for name, p in module.named_parameters()}
    theirs = copy.deepcopy(module)
    theirs.config._experts_implementation = "eager"
    got, want = (run(m, *routing(17, 2)) for m in (module, theirs))
    assert {name: p.shape for name, p in module.named_parameters()} == before
    for ours, other in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        close(ours, other)


def test_an_older_transformers_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    monkeypatch.delitem(sys.modules, "phalanx.adapters.transformers")
    with pytest.raises(ImportError, match="needs transformers 5.23 or newer, not 5"):
        importlib.import_module("phalanx.adapters.transformers")
