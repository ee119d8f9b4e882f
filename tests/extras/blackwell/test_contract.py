"""The fake and the package agree: signatures, what they take of the adapter, what they refuse."""

import inspect
from typing import Any

import pytest
import torch

from phalanx.extras.blackwell.operands import FORMATS
from tests.extras.blackwell.offline_cudnn import installed, offline
from tests.support import fake_cudnn

pytestmark = pytest.mark.skipif(not installed(), reason="needs the extra `cudnn`")
NAMES = [name for name in vars(fake_cudnn) if name.endswith("_wrapper_sm100")]
CASES = [
    (name, form)
    for form in ("bf16", "mxfp8", "nvfp4")
    for name in NAMES
    if name != f"grouped_gemm_{'quant_' if form == 'bf16' else ''}wrapper_sm100"
]
BF16 = torch.bfloat16
L, S, D, F = 3, 1024, 128, 64
ENDS = [256, 256, 768]


def arguments(name: str, form: str) -> dict[str, Any]:
    """Arguments of the adapter, with small sizes."""
    torch.manual_seed(1)
    ones, ends = torch.ones(L), torch.tensor(ENDS, dtype=torch.int32)
    x, h = (torch.randn(S, n).to(BF16) for n in (D, 2 * F))
    w1, w2 = torch.randn(L, 2 * F, D).to(BF16), torch.randn(L, D, F).to(BF16)
    of_rows = dict(padded_offsets=ends, alpha_tensor=ones, use_dynamic_sched=True)
    prob, offsets = dict(prob_tensor=torch.rand(S)), torch.tensor([0, *ENDS], dtype=torch.int32)
    geglu = dict(linear_offset=0.0, geglu_alpha=1.0, glu_clamp_max=3e38, glu_clamp_min=-3e38)
    if form == "bf16":
        room = torch.empty(S * F + 16, dtype=BF16)
        skip = -room.data_ptr() % 32 // 2
        again = room[skip : skip + S * F].view(S, F)
        more: dict[str, Any] = dict(sfa_tensor=None)
        of_glu: dict[str, Any] = dict(generate_c=True, linear_offset=1.0)
        of_dglu: dict[str, Any] = dict(b_tensor=w2, b_major="n", activation_tensor=again)
        operands = dict(x=(x, None), h=(h, None), w1=(w1, None))
    else:
        own = FORMATS[form]
        operands = dict(x=own.rows(x, offsets, False), h=own.rows(h, offsets, False))
        operands |= dict(w1=own.weights(w1), w2=own.weights(w2.mT), w1t=own.weights(w1.mT))
        operands |= dict(xc=own.columns(x, offsets, False), hc=own.columns(h, offsets, False))
        out = dict(d_dtype=BF16)
        if form == "mxfp8":
            out = dict(d_dtype=torch.float8_e4m3fn, norm_const_tensor=torch.ones(1))
            out["discrete_col_sfd"] = True
        more = dict(sfa_tensor=operands["x"][1], sf_vec_size=own.block)
        of_glu = dict(sfb_tensor=operands["w1"][1], c_dtype=BF16, **geglu, **out)
        of_dglu = dict(zip(("b_tensor", "sfb_tensor"), operands["w2"], strict=False))
        of_dglu |= dict(deterministic=True, **out)
    rows = dict(a_tensor=operands["x"][0], **of_rows, **prob, **more)
    match name:
        case "grouped_gemm_glu_wrapper_sm100":
            bias = torch.randn(L, 2 * F).to(BF16).mT
            weights = dict(b_tensor=operands["w1"][0], bias_tensor=bias, act_func="geglu")
            return rows | weights | of_glu
        case "grouped_gemm_dglu_wrapper_sm100":
            saved = dict(c_tensor=h, beta_tensor=ones, dprob_tensor=torch.zeros(S))
            return rows | saved | of_dglu | geglu | dict(act_func="dgeglu")
        case "grouped_gemm_wrapper_sm100":
            bias = torch.randn(L, D).to(BF16).mT
            weights = dict(b_tensor=w1, b_major="n", bias_tensor=bias)
            return dict(a_tensor=h, **weights, **of_rows, **prob)
        case "grouped_gemm_quant_wrapper_sm100":
            given = dict(zip(("b_tensor", "sfb_tensor"), operands["w1t"], strict=False))
            given |= dict(zip(("a_tensor", "sfa_tensor"), operands["h"], strict=False))
            bias = dict(bias_tensor=torch.randn(L, D).to(BF16).mT, generate_amax=False)
            return rows | given | bias | dict(d_dtype=BF16)
        case "grouped_gemm_wgrad_wrapper_sm100":
            into: dict[str, Any] = dict(
                offsets_tensor=ends,
                wgrad_tensor=torch.zeros(L, 2 * F, D),
                wgrad_dtype=torch.float32,
                accumulate_on_output=True,
            )
            if form == "bf16":
                return dict(a_tensor=h.mT, b_tensor=x, sfa_tensor=None, sfb_tensor=None, **into)
            a, b = operands["hc"], operands["xc"]
            into |= dict(a_tensor=a[0], b_tensor=b[0].mT, sfa_tensor=a[1], sfb_tensor=b[1])
            if form == "nvfp4":
                into |= dict(global_scale_a=ones, global_scale_b=ones)
            return dict(sf_vec_size=own.block, **into)
    raise AssertionError(name)


def damaged(given: dict[str, Any]) -> dict[str, tuple[str, torch.Tensor]]:
    """Ways in which one tensor can be wrong, by name: the argument and what it becomes."""
    found = {}
    for name, t in given.items():
        if not isinstance(t, torch.Tensor):
            continue
        byte = t.element_size() == 1
        raw = t.mT.view(torch.uint8).mT if byte and t.ndim > 1 and t.stride(-1) != 1 else t
        raw = raw.view(torch.uint8) if byte and raw is t else raw
        wrong = torch.int64 if t.is_floating_point() and not byte else torch.float32
        found[f"{name} in {wrong}"] = name, raw.to(wrong)
        twice = torch.cat((raw, raw), -1)
        if byte:
            twice = twice.contiguous().view(t.dtype)
        found[f"{name} with another last dimension"] = name, twice
        if t.ndim > 1 and name not in ("a_tensor", "b_tensor"):
            other = t.mT.contiguous().mT if t.is_contiguous() else t.contiguous()
            found[f"{name} with other strides"] = name, other
        if not byte and name not in ("offsets_tensor", "global_scale_a", "global_scale_b"):
            shifted = torch.empty(t.numel() + 2, dtype=t.dtype)[1 : t.numel() + 1]
            found[f"{name} not aligned"] = name, shifted.as_strided(t.shape, t.stride(), 1)
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


@pytest.mark.parametrize(("name", "form"), CASES)
def test_both_take_what_the_adapter_gives(name, form):
    import cudnn

    with offline(compiles=False) as log:
        theirs = take(cudnn, name, arguments(name, form))
    assert log.launches == 1
    ours = take(fake_cudnn, name, arguments(name, form))
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


@pytest.mark.parametrize(
    ("name", "form"),
    [case if case[1] == "nvfp4" else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_both_refuse_the_same(name, form):
    """Whatever is wrong with a single tensor, in shape, strides, dtype or alignment. Of tensors for
    its block-scaled kernels the package leaves some to the call itself; the fake does not."""
    import cudnn

    cases = damaged(arguments(name, form))
    assert len(cases) > 10
    taken = set()
    for what, (argument, tensor) in cases.items():
        wrong = arguments(name, form) | {argument: tensor}
        try:
            take(fake_cudnn, name, wrong)
        except (AssertionError, RuntimeError, IndexError, ValueError):
            pass
        else:
            raise AssertionError(f"the fake takes {what}")
        with offline(compiles=False):
            try:
                take(cudnn, name, wrong)
            except (ValueError, RuntimeError, AssertionError):
                continue
        taken.add(what)
    if form == "bf16":
        assert not taken
    shapes = {f"{n}_tensor with another last dimension" for n in ("a", "b", "sfa", "sfb")}
    types = {f"{n}_tensor in torch.float32" for n in ("a", "b", "sfa", "sfb")}
    assert not taken & (shapes | types)
