"""GroupedMLP as a user outside Megatron-Core meets it."""

import copy
import doctest
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.functional import module
from phalanx.kernels.functional.module import GroupedMLP
from phalanx.kernels.registry import KernelUnavailable
from tests.kernels.capture import check_replay
from tests.kernels.problems import error, formula

L, D, WIDTH, K = 6, 32, 24, 3
GPT_OSS = Activation("quick_geglu", limit=0.7, offset=1.0)


def routed(*lead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    prob, idx = torch.rand(*lead, L, generator=g).topk(K)
    return torch.randn(*lead, D, generator=g), idx, prob


def statement(m: GroupedMLP, x: torch.Tensor, idx: torch.Tensor, prob: torch.Tensor):
    """Every expert on every token in fp64, then the chosen ones."""
    w1, w2, x = m.w1.double(), m.w2.double(), x.double()
    total = torch.zeros_like(x)
    for e in range(L):
        h = F.linear(x, w1[e], None if m.b1 is None else m.b1[e].double())
        y = F.linear(formula(h, m.activation), w2[e], None if m.b2 is None else m.b2[e].double())
        total = total + y * torch.where(idx == e, prob.double(), 0.0).sum(-1, keepdim=True)
    return total


def test_bf16_and_dtypes_of_the_routing() -> None:
    m = GroupedMLP(L, D, WIDTH, K, dtype=torch.bfloat16)
    x, idx, prob = routed(7)
    out = m(x.bfloat16(), idx.to(torch.int32), prob.bfloat16())
    want = statement(m, x.bfloat16(), idx, prob.bfloat16())
    assert out.dtype == torch.bfloat16 and error(out, want) < 2e-2


def autocast_pass(
    m: GroupedMLP, x: torch.Tensor, dtype: torch.dtype, *, inside: bool = False
) -> list[torch.Tensor]:
    """Output and gradients of a pass under autocast, whose backward pass is inside it or after."""
    _, idx, prob = routed(*x.shape[:-1])
    leaves = [x.detach().requires_grad_(), prob.requires_grad_(), *m.parameters()]
    region = torch.autocast(x.device.type, dtype=dtype)
    with region:
        out = m(leaves[0], idx.to(x.device), leaves[1].to(x.device))
    with region if inside else nullcontext():
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_follows_autocast_as_linear_layers_do(given: torch.dtype, dtype: torch.dtype) -> None:
    """Bits of the module that was cast by hand; gradients in the dtypes of their leaves."""
    torch.manual_seed(0)
    m, x = GroupedMLP(L, D, WIDTH, K, GPT_OSS, bias=True), routed(2, 5)[0].to(given)
    linear = torch.nn.Linear(D, 4)
    with torch.autocast("cpu", dtype=dtype):
        assert linear(x).dtype == dtype
    got = autocast_pass(m, x, dtype)
    by_hand = copy.deepcopy(m).to(dtype)
    _, idx, prob = routed(2, 5)
    leaves = [x.to(dtype).requires_grad_(), prob.requires_grad_(), *by_hand.parameters()]
    out = by_hand(leaves[0], idx, leaves[1])
    want = [out, *torch.autograd.grad(out.float().square().sum(), leaves)]
    assert [t.dtype for t in got] == [dtype, given, *[torch.float32] * 5]
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))
    for ours, theirs in zip(got, autocast_pass(m, x, dtype, inside=True), strict=True):
        assert torch.equal(ours, theirs)


def test_autocast_off_inside_leaves_fp32_alone() -> None:
    """Also its backward pass, while autocast is on again."""
    m, given = GroupedMLP(L, D, WIDTH, K), routed(7)
    want = torch.autograd.grad(m(*given).square().sum(), list(m.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            out = m(*given)
        got = torch.autograd.grad(out.square().sum(), list(m.parameters()))
    assert out.dtype == torch.float32
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


def test_fp64_is_not_cast() -> None:
    m, (x, idx, prob) = GroupedMLP(L, D, WIDTH, K), routed(7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match="^w1 is bf16, x is fp64: give them one dtype$"):
            m(x.double(), idx, prob)
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(x.double(), m.w1[0])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "torch", "fused"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_follows_autocast_on_a_gpu(given: torch.dtype, backend: str) -> None:
    torch.manual_seed(0)
    bf16, where = torch.bfloat16, dict(backend=backend, device="cuda")
    m = GroupedMLP(L, 256, 192, K, **where)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=g).to("cuda", given)
    _, idx, prob = routed(64)
    try:
        want = copy.deepcopy(m).to(bf16)(x.to(bf16), idx.cuda(), prob.cuda())
    except KernelUnavailable as reason:
        pytest.skip(str(reason))
    got = autocast_pass(m, x, bf16)
    assert [t.dtype for t in got] == [bf16, given, *[torch.float32] * 3]
    assert torch.equal(got[0], want)
    for ours, theirs in zip(got, autocast_pass(m, x, bf16, inside=True), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_ids_of_64_bits_in_a_graph() -> None:
    """Ids that no expert has are found on the device, whatever they are in a replay."""
    m = GroupedMLP(L, 256, 192, K, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    _, idx, prob = (t.cuda() for t in routed(64))
    none = idx.clone()
    none[::3, 0] = -1
    with torch.no_grad():
        want = m(x, none, prob)
        check_replay(lambda: [m(x, idx, prob)], idx, torch.where(none < 0, (1 << 32) + 1, idx))
        assert torch.equal(m(x, idx, prob), want)


def test_state_is_canonical() -> None:
    m = GroupedMLP(L, D, WIDTH, K, bias=True)
    assert {name: tuple(t.shape) for name, t in m.state_dict().items()} == {
        "w1": (L, 2 * WIDTH, D),
        "w2": (L, D, WIDTH),
        "b1": (L, 2 * WIDTH),
        "b2": (L, D),
    }
    other = GroupedMLP(L, D, WIDTH, K, bias=True, backend="reference")
    other.load_state_dict(m.state_dict())
    given = routed(4)
    torch.testing.assert_close(other(*given), m(*given))
    assert GroupedMLP(L, D, WIDTH, K).state_dict().keys() == {"w1", "w2"}


def test_drawn_like_linear_layers() -> None:
    torch.manual_seed(0)
    m = GroupedMLP(16, 64, 256, 2, bias=True)
    for weight, fan_in in ((m.w1, 64), (m.w2, 256), (m.b1, 64), (m.b2, 256)):
        assert weight.abs().max() <= fan_in**-0.5
        assert weight.std().item() == pytest.approx((3 * fan_in) ** -0.5, rel=0.1)
    assert m.w1[0].ne(m.w1[1]).any()


def test_builds_without_memory() -> None:
    m = GroupedMLP(256, 7168, 2048, 8, device="meta", dtype=torch.bfloat16)
    assert m.w1.is_meta and m.w1.shape == (256, 4096, 7168)


def test_repr() -> None:
    assert repr(GroupedMLP(L, D, WIDTH, K, GPT_OSS, bias=True)) == (
        "GroupedMLP(experts=6, hidden=32, ffn=24, top_k=3, activation=quick_geglu, bias=True, "
        "backend=auto)"
    )


def test_example_runs() -> None:
    result = doctest.testmod(module)
    assert result.attempted == 7 and not result.failed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(top_k=7), "top_k at most experts"),
        (dict(ffn=0), "must be positive"),
        (dict(backend="te"), "backend=te is unknown: use fused, cudnn, torch, reference or auto"),
        (dict(activation="gelu"), "unknown activation 'gelu'"),
    ],
)
def test_arguments_are_checked(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedMLP(**{"experts": L, "hidden": D, "ffn": WIDTH, "top_k": K, **arguments})


def test_inputs_are_checked() -> None:
    m, (x, idx, prob) = GroupedMLP(L, D, WIDTH, K), routed(5)
    for given in ((x[:, :-1], idx, prob), (x, idx[:, :-1], prob), (x, idx, prob[:-1])):
        with pytest.raises(ValueError, match=r"expected x \[..., 32\] and topk_idx"):
            m(*given)
    with pytest.raises(ValueError, match="^w1 is fp32, x is bf16: give them one dtype$"):
        m(x.bfloat16(), idx, prob)
    with pytest.raises(KernelUnavailable, match="needs CUDA"):
        GroupedMLP(L, D, WIDTH, K, backend="fused")(x, idx, prob)
