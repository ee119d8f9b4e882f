"""MXFP8 and NVFP4 through cuDNN's wrappers, as the fake computes them, against the emulation."""

from dataclasses import replace

import pytest
import torch

from phalanx.extras.blackwell.interleave import Interleaved
from phalanx.extras.blackwell.operands import FORMATS, pack, pack_columns, unpack
from phalanx.extras.microscaling import mxfp8, nvfp4
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.quantize.recipe import Microscaling
from tests.extras.blackwell.problems import padded
from tests.kernels.problems import dense, error, forward, gradients, leaves_of
from tests.support.fake_cudnn import scaled

ACTIVATIONS = {
    "swiglu": Activation("swiglu"),
    "clamped swiglu": Activation("swiglu", limit=2.0, offset=0.5),
    "gpt-oss": Activation("quick_geglu", alpha=1.702, limit=7.0, offset=1.0),
    "another alpha": Activation("quick_geglu", alpha=1.3, limit=0.9),
}
FORMS = ("mxfp8", "nvfp4")


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (130, 7), (256, 8), (300, 2)])
def test_scales_are_packed_as_stated(rows, blocks):
    scale = torch.randint(256, (rows, blocks), dtype=torch.uint8)
    packed = pack(scale)
    assert packed.numel() == scaled.size(rows, blocks)
    assert torch.equal(packed[scaled.places(rows, blocks)], scale)
    assert torch.equal(unpack(packed, rows, blocks), scale)
    assert torch.equal(pack(scale[None].expand(3, -1, -1)), packed.repeat(3))


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("ends", [[256, 256, 1024], [512], [0, 768], [0, 0]])
def test_scales_of_columns_are_those_of_each_expert(ends, block):
    C, T = 192, 1024
    scale = torch.randint(256, (C, T // block), dtype=torch.uint8)
    offsets = torch.tensor([0, *ends], dtype=torch.int32)
    packed = pack_columns(scale, offsets, block)
    assert packed.numel() == scaled.size(C, T // block)
    base = 0
    for begin, end in zip([0, *ends], ends, strict=False):
        own = pack(scale[:, begin // block : end // block])
        assert torch.equal(packed[base : base + own.numel()], own)
        base += own.numel()


@pytest.mark.parametrize("form", FORMS)
def test_operands_have_the_values_of_the_definition(form):
    x, w = torch.randn(512, 128).bfloat16(), torch.randn(2, 96, 128).bfloat16()
    offsets = torch.tensor([0, 256, 512], dtype=torch.int32)
    made = FORMATS[form]
    own = scaled.FAMILIES[scaled.FP8 if form == "mxfp8" else scaled.FP4]
    rows, weights = made.rows(x, offsets, False), made.weights(w)
    columns = made.columns(x, offsets, False)
    got = [
        scaled.read("x", rows.data, rows.scale, (512, 128), own),
        scaled.read("w", weights.data, weights.scale, (2, 96, 128), own),
        scaled.read_columns("c", columns.data, columns.scale, offsets[1:], 128, own)[:, :512],
    ]
    if form == "mxfp8":
        wanted = [
            mxfp8.dequantize(mxfp8.quantize(x)),
            mxfp8.dequantize(mxfp8.quantize(w)),
            mxfp8.dequantize(mxfp8.quantize_columns(x, offsets))[:, :512],
        ]
    else:
        wanted = [
            nvfp4.values_of_rows(nvfp4.quantize_rows(x, offsets)),
            nvfp4.values_of_weights(nvfp4.quantize_weights(w)),
            nvfp4.values_of_rows(nvfp4.quantize_columns(x, offsets))[:, :512],
        ]
    for value, exact in zip(got, wanted, strict=True):
        assert torch.equal(value, exact)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_the_emulation_is_met(fake, form, act, bias):
    """Errors are those of the emulation over the reference, and their distance is smaller:
    an epilogue quantizes values that were not rounded to bf16 before, and a difference in the last
    bit may give the next number of the format. Values that no epilogue quantizes are equal."""
    p = padded(act, bias=bias, room=256, D=128, width=128)
    q, real = unpadded(p)
    recipe = Microscaling(form, stochastic=False)
    exact = dense(q)
    leaves = leaves_of(q)
    emulated = gradients(forward(q, leaves, "reference", recipe=recipe), q.dout, leaves)
    leaves = leaves_of(p)
    ours = gradients(forward(p, leaves, "cudnn", recipe=recipe), p.dout, leaves)
    assert (ours["dprob"][~real] == 0).all()
    ours["dprob"] = ours["dprob"][real]
    for name in exact:
        truth = max(error(emulated[name], exact[name]), 2**-9)  # rounded to bf16 in the end
        # The gradient of b1 is a sum of what was quantized in MXFP8.
        assert error(ours[name], exact[name]) <= 1.25 * truth, name
        assert error(ours[name], emulated[name]) <= truth, name
    for name in {"mxfp8": ["dw2"], "nvfp4": ["dx", "dw1", "dw2", "dprob"]}[form]:
        assert error(ours[name], emulated[name]) < 2e-3, name
    assert fake.CALLS["grouped_gemm_quant_wrapper_sm100"] == 2


def test_gradients_are_rounded_at_random(fake):
    """In NVFP4, as the emulation does: that of out from the same keys, whatever rows the plan has;
    that of h, whose channels have another order, from others."""
    p = padded(ACTIVATIONS["swiglu"], D=128, width=128)
    q, _ = unpadded(p)
    found = []
    for problem, backend in ((p, "cudnn"), (q, "reference")):
        leaves = leaves_of(problem)
        out = forward(problem, leaves, backend, recipe=Microscaling("nvfp4"))
        found.append(gradients(out, problem.dout, leaves))
    ours, emulated = found
    assert error(ours["dw2"], emulated["dw2"]) < 2e-3
    exact = dense(q)
    for name in ("dx", "dw1"):
        assert error(ours[name], exact[name]) <= 1.25 * error(emulated[name], exact[name]), name
        assert error(ours[name], emulated[name]) > 1e-2, name


@pytest.mark.parametrize("form", FORMS)
def test_stored_in_the_order_of_the_kernels(fake, form):
    p, order = padded(ACTIVATIONS["gpt-oss"], D=128, width=128), Interleaved()
    recipe = Microscaling(form)
    leaves = leaves_of(p)
    wanted = gradients(forward(p, leaves, "cudnn", recipe=recipe), p.dout, leaves)
    for name in ("w1", "b1"):
        leaves[name] = order.store(leaves[name].detach(), 1).requires_grad_()
    out = forward(p, leaves, "cudnn", recipe=recipe, channel_order=order)
    got = gradients(out, p.dout, leaves)
    for name in ("dw1", "db1"):
        got[name] = order.canonical(got[name], 1)
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


def test_weight_gradients_in_bf16_are_refused(fake):
    p = padded(ACTIVATIONS["swiglu"])
    with pytest.raises(ValueError, match="kernels=cudnn has no precision.wgrad=bf16"):
        forward(p, leaves_of(p), "cudnn", recipe=Microscaling("mxfp8", wgrad="bf16"))


def unpadded(p):
    """The same problem without rows of no token, and which rows have one."""
    used = int(p.offsets[-1])
    real = (p.index >= 0) & (torch.arange(len(p.index)) < used)
    place = real.cumsum(0, dtype=torch.int32) - 1
    before = torch.nn.functional.pad(real.cumsum(0, dtype=torch.int32), (1, 0))
    inverse = torch.where(p.inverse >= 0, place[p.inverse.clamp(min=0)], -1)
    return replace(
        p,
        index=p.index[real],
        prob=p.prob[real],
        offsets=before[p.offsets.long()],
        inverse=inverse.to(torch.int32),
    ), real
