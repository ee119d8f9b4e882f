"""Balancing losses, counts and forced balance by kernels, against the composition in fp64."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from phalanx.configs.schema import RouterConfig
from phalanx.kernels.routing.balance import (
    balance_loss,
    count_choices,
    count_choices_per_sequence,
    z_loss,
)
from phalanx.kernels.routing.forced_triton import split
from phalanx.kernels.routing.topk_scores import choose, probabilities
from phalanx.moe.router import balance
from phalanx.moe.router.balance import Recorder
from phalanx.moe.router.forced import ForcedBalance
from phalanx.moe.router.logits import loss_scores
from tests.kernels.capture import check_replay
from tests.kernels.interpreter import interpret

ONE: Any = SimpleNamespace(size=lambda: 1)
WIDTHS = (torch.float32, torch.float64)
EVERY = {"aux_loss": 0.3, "seq_aux_loss": 0.7, "global_aux_loss": 0.5, "z_loss": 0.2}


class Case(NamedTuple):
    """T tokens of B sequences, E experts, K of them per token."""

    T: int
    B: int
    E: int
    K: int
    options: dict[str, Any]
    judged: bool = False
    """The losses judge other choices."""
    per_token: bool = False


SMALL = [
    Case(10, 2, 6, 2, {"aux_loss": 0.3}),
    Case(9, 3, 8, 3, {"seq_aux_loss": 0.7, "score": "sigmoid"}, judged=True),
    Case(70, 1, 12, 1, {"z_loss": 0.2}, per_token=True),
    Case(12, 2, 16, 4, {**EVERY}),
    Case(36, 3, 5, 2, {**EVERY, "score": "sigmoid"}, judged=True, per_token=True),
    Case(3, 1, 4, 4, {}),
]
MODELS = [
    Case(8192, 2, 128, 8, {"aux_loss": 1e-3}),
    Case(8192, 2, 256, 8, {"seq_aux_loss": 1e-4, "score": "sigmoid"}, judged=True),
    Case(4097, 1, 32, 4, {"aux_loss": 0.9, "z_loss": 1e-3}),
    Case(1002, 3, 60, 6, {**EVERY}),
    Case(4096, 4, 512, 8, {**EVERY, "score": "sigmoid"}, judged=True, per_token=True),
]


def ids(case: Case) -> str:
    return f"{case.T}-{case.B}-{case.E}-{'-'.join(str(v) for v in case.options)}"


class Made(NamedTuple):
    """A recorder and what it is called with."""

    record: Recorder
    logits: torch.Tensor
    idx: torch.Tensor
    judged: torch.Tensor | None


def made(case: Case, device: str, seed: int = 0) -> Made:
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(case.T, case.E, generator=g).to(device) * 3  # noqa: E731
    logits, other = draw().requires_grad_(), draw()
    statistics = balance.Statistics(case.E).to(device)
    best = choose(logits.detach(), case.K)
    return Made(
        Recorder(
            RouterConfig(**case.options),
            statistics,
            torch.arange(case.E, device=device),
            torch.arange(case.E, device=device) * 2,
            ONE,
            ONE,
            case.per_token,
        ),
        logits,
        choose(other, case.K).int() if case.judged else best.int(),
        best.int() if case.judged else None,
    )


def stated(
    m: Made, case: Case, seen: torch.Tensor, logits: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Shares of the losses in the dtype of the logits, by `moe.router.balance`."""
    o = m.record.options
    score, judged = loss_scores(logits, o.score), m.idx if m.judged is None else m.judged
    count = count_choices(judged, case.E)
    by_sequence = count_choices_per_sequence(judged, case.E, case.B)
    return {
        "aux_loss": balance_loss(score, count[None], ranks=1),
        "seq_aux_loss": balance_loss(score, by_sequence, ranks=1),
        "global_aux_loss": balance_loss(score, (seen + count)[None], ranks=1),
        "z_loss": z_loss(logits),
    }


def check_losses(case: Case, device: str) -> None:
    """Values to fp32; gradients, small differences of shares, beside the composition's in fp32."""
    m = made(case, device)
    seen, factor = torch.arange(case.E, device=device) * 2, case.T if case.per_token else 1
    plain, wide = (m.logits.detach().to(dtype).requires_grad_() for dtype in WIDTHS)
    shares = stated(m, case, seen, wide)
    coefficients = {name: case.options.get(name, 0.0) for name in shares}

    def total(shares: dict[str, torch.Tensor]) -> Any:
        return factor * sum(coefficients[name] * share for name, share in shares.items())

    loss = m.record(m.logits, m.idx, m.judged, case.B)
    count = count_choices(m.idx, case.E)
    s = m.record.statistics
    assert torch.equal(s.tokens_per_expert, count) and s.micro_batches == 1
    assert torch.equal(m.record.local_tokens_E, count + torch.arange(case.E, device=device))
    for noted, (name, share) in zip(s.losses[:4].double(), shares.items(), strict=True):
        torch.testing.assert_close(noted, share * bool(coefficients[name]), rtol=1e-5, atol=1e-7)
    if not any(coefficients.values()):
        assert loss is None
        return
    torch.testing.assert_close(loss.double(), total(shares)[None], rtol=1e-5, atol=1e-7)
    (got,) = torch.autograd.grad(0.7 * loss, m.logits)
    (exact,) = torch.autograd.grad(0.7 * total(shares), wide)
    (other,) = torch.autograd.grad(0.7 * total(stated(m, case, seen, plain)), plain)
    ours, theirs = ((g.double() - exact).abs().max().item() for g in (got, other))
    assert ours <= max(2 * theirs, 1e-6 * exact.abs().max().item()), (ours, theirs)


FORCED = [
    # T, first token, E, K, options
    (10, 0, 8, 2, {}),
    (33, 33, 16, 4, {"groups": 4, "group_topk": 2, "score": "sigmoid", "scale": 2.5}),
    (9, 0, 12, 3, {"normalize": False, "scale": 1.5}),
    (2000, 4000, 24, 1, {"score": "sigmoid", "normalize": False}),
]


def check_forced(T: int, first: int, E: int, K: int, options: dict[str, Any], device: str) -> None:
    from phalanx.kernels.routing.forced_triton import forced
    from phalanx.moe.router.fused_topk import _kind

    o = RouterConfig(**options)
    module = ForcedBalance(o, experts=E, top_k=K).to(device)
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(0)).to(device)
    how: Any = dict(groups=o.groups, weights=_kind(o, K), scale=o.scale)
    idx, prob = forced(logits, module.table, first, **how)
    want = module(T, first)
    assert idx.dtype == torch.int32 and torch.equal(idx.long(), want)
    exact = probabilities(logits.double(), want, o)
    torch.testing.assert_close(prob.double(), exact, rtol=1e-5, atol=1e-7)
    recorded = module(T // 2 + 1, 7).to(torch.int16)  # fewer tokens than there are
    idx, prob = forced(logits, recorded, first, **how)
    row = torch.arange(first, first + T, device=device) % len(recorded)
    assert idx.dtype == torch.int32 and torch.equal(idx, recorded[row].int())
    exact = probabilities(logits.double(), recorded[row].long(), o)
    torch.testing.assert_close(prob.double(), exact, rtol=1e-5, atol=1e-7)


def check_split(T: int, E: int, device: str) -> None:
    grad = torch.randn(T, E, generator=torch.Generator().manual_seed(0)).to(device)
    both, total = split(grad, torch.float32)
    high, rest = (part.double() for part in both.chunk(2, 1))
    assert bool(((high - grad).abs() <= 2**-7 * grad.abs()).all())
    assert bool(((high + rest - grad).abs() <= 2**-14 * grad.abs()).all())
    assert total is not None
    torch.testing.assert_close(total.double(), grad.double().sum(0), rtol=1e-5, atol=1e-5)
    assert split(grad, None)[1] is None
    if device == "cuda":  # the interpreter truncates
        assert torch.equal(both, torch.cat((high, (grad - high).bfloat16()), 1).bfloat16())


def interpreted() -> None:
    """In a process of its own, where Triton interprets kernels on CPU tensors."""
    from phalanx.parallel.megatron.cpu import install

    install()
    for case in SMALL:
        check_losses(case, "cpu")
    for forced in FORCED:
        check_forced(*forced, "cpu")
    for T, E in ((1, 4), (33, 12), (700, 16)):
        check_split(T, E, "cpu")


def test_kernels_interpreted() -> None:
    interpret(__name__)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL, *MODELS], ids=ids)
def test_losses(case: Case) -> None:
    check_losses(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FORCED, (8192, 8192, 128, 8, {}), (99, 0, 512, 8, {})])
def test_forced(case: tuple[Any, ...]) -> None:
    check_forced(*case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "E"), [(1, 4), (33, 12), (8192, 128), (4097, 256)])
def test_split_of_a_gradient(T: int, E: int) -> None:
    check_split(T, E, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", MODELS, ids=ids)
def test_graph_capture_and_the_same_bits(case: Case) -> None:
    m = made(case, "cuda")
    m.record.statistics.losses.zero_()
    up = torch.tensor([0.7], device="cuda")

    def step() -> list[torch.Tensor]:
        m.record.global_tokens_E.zero_()  # type: ignore[union-attr]
        loss = m.record(m.logits, m.idx, m.judged, case.B)
        assert loss is not None
        return [loss, *torch.autograd.grad(loss, m.logits, up)]

    check_replay(step, m.logits, made(case, "cuda", seed=1).logits.detach())
