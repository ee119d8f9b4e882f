"""The fake and the package agree: signatures, what they take of the adapter, what they refuse."""

import inspect
from typing import Any

import pytest
import torch

from tests.support import fake_cudnn
from tests.support.offline_cudnn import installed, offline

pytestmark = pytest.mark.skipif(not installed(), reason="needs the extra `cudnn`")
NAMES = [name for name in vars(fake_cudnn) if name.endswith("_wrapper_sm100")]
BF16 = torch.bfloat16
L, S, D, F = 3, 1024, 128, 64
ENDS = [256, 256, 768]


def arguments(name: str) -> dict[str, Any]:
    """What the adapter gives, of small sizes."""
    ones, ends = torch.ones(L), torch.tensor(ENDS, dtype=torch.int32)
    x, h = (torch.randn(S, n).to(BF16) for n in (D, 2 * F))
    w1, w2 = torch.randn(L, 2 * F, D).to(BF16), torch.randn(L, D, F).to(BF16)
    of_rows = dict(padded_offsets=ends, alpha_tensor=ones, prob_tensor=torch.rand(S))
    of_rows["use_dynamic_sched"] = True
    room = torch.empty(S * F + 16, dtype=BF16)
    skip = -room.data_ptr() % 32 // 2
    match name:
        case "grouped_gemm_glu_wrapper_sm100":
            bias = torch.randn(L, 2 * F).to(BF16).mT
            more = dict(sfa_tensor=None, b_tensor=w1, bias_tensor=bias, generate_c=True)
            return dict(a_tensor=x, act_func="geglu", linear_offset=1.0, **of_rows, **more)
        case "grouped_gemm_dglu_wrapper_sm100":
            return dict(
                a_tensor=x,
                c_tensor=h,
                sfa_tensor=None,
                beta_tensor=ones,
                dprob_tensor=torch.zeros(S),
                b_tensor=w2,
                b_major="n",
                activation_tensor=room[skip : skip + S * F].view(S, F),
                act_func="dgeglu",
                linear_offset=0.0,
                geglu_alpha=1.0,
                glu_clamp_max=3e38,
                glu_clamp_min=-3e38,
                **of_rows,
            )
        case "grouped_gemm_wrapper_sm100":
            bias = torch.randn(L, D).to(BF16).mT
            return dict(a_tensor=h, b_tensor=w1, b_major="n", bias_tensor=bias, **of_rows)
        case "grouped_gemm_wgrad_wrapper_sm100":
            return dict(
                a_tensor=h.mT,
                b_tensor=x,
                sfa_tensor=None,
                sfb_tensor=None,
                offsets_tensor=ends,
                wgrad_tensor=torch.zeros(L, 2 * F, D),
                wgrad_dtype=torch.float32,
                accumulate_on_output=True,
            )
    raise AssertionError(name)


def damaged(given: dict[str, Any]) -> dict[str, tuple[str, torch.Tensor]]:
    """Ways in which one tensor can be wrong, by name: the argument and what it becomes."""
    found = {}
    for name, t in given.items():
        if not isinstance(t, torch.Tensor):
            continue
        wrong = torch.int64 if t.is_floating_point() else torch.float32
        found[f"{name} in {wrong}"] = name, t.to(wrong)
        shifted = torch.empty(t.numel() + 2, dtype=t.dtype)[1 : t.numel() + 1]
        if name != "offsets_tensor":  # these may start anywhere
            found[f"{name} not aligned"] = name, shifted.as_strided(t.shape, t.stride(), 1)
        found[f"{name} with another last dimension"] = name, torch.cat((t, t), -1)[..., :-1]
        if t.ndim > 1 and name not in ("a_tensor", "b_tensor"):
            other = t.mT.contiguous().mT if t.is_contiguous() else t.contiguous()
            found[f"{name} with other strides"] = name, other
    return found


def take(module: Any, name: str, given: dict[str, Any]) -> Any:
    return getattr(module, name)(**given)


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name):
    import cudnn

    ours = inspect.signature(getattr(fake_cudnn, name)).parameters
    theirs = inspect.signature(getattr(cudnn, name)).parameters
    assert list(ours) == list(theirs)
    for own, other in zip(ours.values(), theirs.values(), strict=True):
        assert own.kind == other.kind, own.name
        assert own.default == getattr(other.default, "value", other.default), own.name


@pytest.mark.parametrize("name", NAMES)
def test_both_take_what_the_adapter_gives(name):
    import cudnn

    with offline(compiles=False) as log:
        theirs = take(cudnn, name, arguments(name))
    assert log.launches == 1
    ours = take(fake_cudnn, name, arguments(name))
    assert set(ours) == set(theirs.keys())
    for key, value in ours.items():
        other = theirs[key]
        assert (value is None) == (other is None), key
        if value is not None:
            assert (value.shape, value.dtype, value.stride()) == (
                other.shape,
                other.dtype,
                other.stride(),
            ), key


@pytest.mark.parametrize("name", NAMES)
def test_both_refuse_the_same(name):
    """Whatever is wrong with a single tensor, in shape, strides, dtype or alignment."""
    import cudnn

    given = arguments(name)
    cases = damaged(given)
    assert len(cases) > 10
    for what, (argument, tensor) in cases.items():
        wrong = arguments(name) | {argument: tensor}
        with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
            take(fake_cudnn, name, wrong)
            print(f"the fake takes {what}")
        with offline(compiles=False):
            with pytest.raises((ValueError, RuntimeError, AssertionError)):
                take(cudnn, name, wrong)
                print(f"the package takes {what}")
