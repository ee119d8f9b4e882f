"""flash-linear-attention's kernels, and ours among them, on a GPU: errors beside those of torch in
the same precision, documents, bits, graphs.

With `-s` the tests print errors and times.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("fla")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from phalanx.extras.linear_attention.gated_delta import (
    causal_conv,
    gated_delta_rule,
    gated_rms_norm,
)
from tests.extras.linear_attention import recurrent
from tests.extras.linear_attention.problems import Case, given, gradient
from tests.kernels.capture import check_replay

pytestmark = pytest.mark.gpu

QWEN3_NEXT = Case(1, 4096, 16, 32, 128)
CASES = [
    Case(1, 64, 1, 1, 128),
    Case(2, 200, 2, 4, 128),
    Case(1, 1, 1, 2, 128),
    Case(3, 65, 1, 3, 64),
    Case(1, 1000, 2, 2, 16),
    Case(2, 130, 1, 2, 128, ((0, 1, 2, 63, 64, 65, 129), (0, 100))),
    Case(1, 700, 2, 4, 128, ((0, 10, 64, 128, 190, 699),)),
]
NAMES = ("out", "dq", "dk", "dv", "dlog_decay", "dbeta")


def everything(case: Case, leaves: list[Tensor], backend: str) -> list[Tensor]:
    """Output and gradients, in the dtypes of the inputs."""
    place = case.position_BS
    place = None if place is None else place.cuda()
    out = gated_delta_rule(*leaves, place, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient(out))]


def error(got: Tensor, exact: Tensor) -> float:
    """Relative; of what is zero, such as what the first token's decay does, absolute."""
    size = exact.norm()
    return ((got.double() - exact).norm() / torch.where(size > 0, size, 1.0)).item()


@pytest.mark.parametrize("case", [*CASES, QWEN3_NEXT], ids=str)
def test_bf16_is_nearly_as_exact_as_fp32_sums_of_bf16(case: Case) -> None:
    """The library rounds states, solved systems and what tokens write to bf16, the statement in
    torch only inputs and outputs: of both, against the statement in fp64."""
    leaves = given(case, torch.bfloat16, "cuda")
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = everything(case, exact_leaves, "torch")
    ours, torchs = (everything(case, leaves, backend) for backend in ("fla", "torch"))
    for name, a, b, want in zip(NAMES, ours, torchs, exact, strict=True):
        found, rounded = error(a, want), error(b, want)
        print(f"{case} {name}: {found:.2e}, torch {rounded:.2e}")
        assert a.dtype == b.dtype and a.shape == want.shape
        # A few roundings of 2^-9 beside the one that both have.
        assert found <= 3 * rounded + 2**-7, name


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_statement_on_a_gpu_is_the_recurrence(case: Case) -> None:
    leaves = given(case, torch.float64, "cuda")
    exact_out = recurrent.rule(*leaves)
    exact = [exact_out.detach(), *torch.autograd.grad(exact_out, leaves, gradient(exact_out))]
    for name, got, want in zip(NAMES, everything(case, leaves, "torch"), exact, strict=True):
        assert error(got, want) < 1e-11, name


@pytest.mark.parametrize("case", [c for c in CASES if c.documents], ids=str)
def test_nothing_of_an_earlier_document_is_left(case: Case) -> None:
    """Changes of the first document change no bit of the others."""
    leaves = given(case, torch.bfloat16, "cuda")
    place = case.position_BS
    assert place is not None and case.documents is not None
    before = gated_delta_rule(*leaves, place.cuda(), backend="fla")
    second = [x.detach().clone() for x in leaves]
    first = case.documents[0][1]
    for x in second[:3]:
        x[0, :first] = -x[0, :first]
    after = gated_delta_rule(*second, place.cuda(), backend="fla")
    assert torch.equal(before[0, first:], after[0, first:])
    assert not torch.equal(before[0, :first], after[0, :first])


def test_the_same_bits_twice() -> None:
    leaves = given(QWEN3_NEXT, torch.bfloat16, "cuda")
    once, twice = (everything(QWEN3_NEXT, leaves, "fla") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("documents", [False, True])
def test_graphs_replay(documents: bool) -> None:
    case = CASES[5] if documents else CASES[1]
    leaves = given(case, torch.bfloat16, "cuda")
    place = case.position_BS
    place = None if place is None else place.cuda()

    def step() -> list[Tensor]:
        out = gated_delta_rule(*leaves, place, backend="fla")
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    check_replay(step, leaves[0], torch.randn_like(leaves[0]))


@pytest.mark.parametrize("shape", [(1, 4096, 8192), (2, 77, 96), (1, 3, 64)])
def test_convolution(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(shape[2], 4, device="cuda").bfloat16().requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = causal_conv(*wide)
    wanted = [exact, *torch.autograd.grad(exact, wide, gradient(exact))]
    for backend in ("torch", "fla"):
        out = causal_conv(x, w, backend=backend)
        found = [out, *torch.autograd.grad(out, (x, w), gradient(out))]
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == torch.bfloat16 and error(got, want) < 2**-7, backend


def test_part_of_a_projection_is_convolved_in_place() -> None:
    """The layer gives a slice of rows of its input projection."""
    whole = torch.randn(2, 50, 200, device="cuda").bfloat16()
    w = torch.randn(96, 4, device="cuda").bfloat16()
    part = whole.transpose(0, 1).contiguous().transpose(0, 1)[..., :96]
    got = causal_conv(part, w, backend="fla")
    assert torch.equal(got, causal_conv(part.contiguous(), w, backend="fla"))


@pytest.mark.parametrize("shape", [(1, 4096, 32, 128), (2, 5, 3, 128), (1, 1, 1, 64)])
def test_gated_norm(shape: tuple[int, ...]) -> None:
    x, gate = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in "xg")
    weight = torch.rand(shape[-1], device="cuda").bfloat16().requires_grad_()
    leaves = (x, gate, weight)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = gated_rms_norm(*wide, 1e-6)
    wanted = [exact, *torch.autograd.grad(exact, wide, gradient(exact))]
    out = gated_rms_norm(*leaves, 1e-6, backend="fla")
    found = [out, *torch.autograd.grad(out, leaves, gradient(out))]
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.bfloat16 and error(got, want) < 2**-7
