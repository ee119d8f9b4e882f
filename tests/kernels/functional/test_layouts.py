"""Weights in the layouts of others: the same results, and the same state dicts."""

import doctest
import pickle

import pytest
import torch
from torch import Tensor, nn

from phalanx.kernels.api import LAYOUTS, Activation, grouped_experts, keep_converted
from phalanx.kernels.functional import layouts
from tests.kernels.problems import error

E, D, WIDTH = 4, 16, 24
ACT = Activation("quick_geglu", limit=7.0, offset=1.0)
NAMES = ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"]


class GptOss(nn.Module):
    """Experts in GPT-OSS's own words, with its layout."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, D, 2 * WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(E, WIDTH, D) / 5)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(E, 2 * WIDTH))
        self.down_proj_bias = nn.Parameter(torch.randn(E, D))

    def weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in NAMES]

    def statement(self, x: Tensor, idx: Tensor, prob: Tensor) -> Tensor:
        gate_up = torch.einsum("td,edh->teh", x, self.gate_up_proj) + self.gate_up_proj_bias
        gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
        a = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        y = torch.einsum("tef,efd->ted", a, self.down_proj) + self.down_proj_bias
        return (y * torch.zeros(len(x), E).scatter(1, idx, prob)[..., None]).sum(1)


@pytest.fixture
def given() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    prob, idx = torch.rand(9, E).topk(2)
    return torch.randn(9, D), idx, prob


def test_gpt_oss(given: tuple[Tensor, Tensor, Tensor]) -> None:
    """Results after a conversion in the call, and at once."""
    theirs = GptOss()
    x, idx, prob = given
    want = theirs.statement(*given)
    grads = torch.autograd.grad(want.square().sum(), theirs.weights())
    layout = "transposed_interleaved"
    out = grouped_experts(x, idx, prob, *theirs.weights(), activation=ACT, layout=layout)
    assert error(out, want) < 1e-6
    got = torch.autograd.grad(out.square().sum(), theirs.weights())
    assert all(error(ours, true) < 1e-6 for ours, true in zip(got, grads, strict=True))

    keep_converted(theirs, layout, NAMES)
    out = grouped_experts(x, idx, prob, *theirs.weights(), activation=ACT)
    assert error(out, want) < 1e-6
    out.square().sum().backward()
    stored = LAYOUTS[layout]
    for name, grad in zip(NAMES, grads, strict=True):
        ours = getattr(theirs, name).grad
        assert error(stored.from_kernels(ours, fc1="gate" in name), grad) < 1e-6


def test_gradients_have_the_layout_of_the_weights(given: tuple[Tensor, Tensor, Tensor]) -> None:
    """And those that are added in place, of weights without a buffer, the same values."""
    theirs = GptOss()
    want = torch.autograd.grad(theirs.statement(*given).square().sum(), theirs.weights())
    for accumulate in (False, True):
        options = dict(activation=ACT, layout="transposed_interleaved", accumulate=accumulate)
        out = grouped_experts(*given, *theirs.weights(), **options)
        got = torch.autograd.grad(out.square().sum(), theirs.weights())
        for ours, true in zip(got, want, strict=True):
            assert error(ours, true) < 1e-6
            assert accumulate or ours.is_contiguous()  # an optimizer takes it without a copy


def test_copies_are_not_kept_for_the_backward_pass(given: tuple[Tensor, Tensor, Tensor]) -> None:
    """They are as large as the weights, and every layer of a model would keep its own."""
    theirs, saved = GptOss(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        grouped_experts(*given, *theirs.weights(), activation=ACT, layout="transposed_interleaved")
    own = {w.untyped_storage().data_ptr() for w in theirs.weights()}
    matrices = [x for x in saved if x.ndim == 3]
    assert len(matrices) == 2
    assert all(x.untyped_storage().data_ptr() in own for x in matrices)


def test_state_dicts_keep_the_layout() -> None:
    """Also inside another module, loaded by copy and by assignment, whole and in part."""
    model = nn.ModuleDict(dict(experts=GptOss()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keep_converted(model["experts"], "transposed_interleaved", NAMES)
    keep_converted(model["experts"], "transposed_interleaved", NAMES)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for assign in (False, True):
        other = nn.ModuleDict(dict(experts=GptOss()))
        keep_converted(other["experts"], "transposed_interleaved", NAMES)
        other.load_state_dict(before, assign=assign)
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    pickled = pickle.loads(pickle.dumps(model))
    assert all(torch.equal(before[name], value) for name, value in pickled.state_dict().items())
    part = {"experts.down_proj": torch.ones(E, WIDTH, D)}
    other.load_state_dict(part, strict=False)
    assert other["experts"].down_proj.shape == (E, D, WIDTH)
    assert torch.equal(other["experts"].gate_up_proj, model["experts"].gate_up_proj)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_names_are_those_of_weights_and_biases() -> None:
    with pytest.raises(ValueError, match="^names are those of w1, w2, b1 and b2: give None"):
        keep_converted(nn.Module(), "transposed", ["gate_up_proj", "down_proj"])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("gated", [True, False])
def test_conversions_are_inverse(name: str, gated: bool) -> None:
    layout, H = LAYOUTS[name], WIDTH * (1 + gated)
    for fc1, shape in ((True, (E, H, D)), (True, (E, H)), (False, (E, D, WIDTH)), (False, (E, D))):
        x = torch.randn(shape)
        there = layout.from_kernels(x, fc1=fc1)
        assert torch.equal(layout.to_kernels(there, fc1=fc1), x) and there.is_contiguous()
        assert name != "halves" or layout.to_kernels(x, fc1=fc1) is x


def test_only_gated_weights_are_interleaved(given: tuple[Tensor, Tensor, Tensor]) -> None:
    w1, w2 = torch.randn(E, WIDTH, D), torch.randn(E, D, WIDTH)
    with pytest.raises(ValueError, match="layout=interleaved: w1 has 24 channels, not 2 x 24"):
        grouped_experts(*given, w1, w2, activation="squared_relu", layout="interleaved")


def test_sharded_parameters_are_refused(gloo_of_one: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    m, mesh = GptOss(), init_device_mesh("cpu", (1,))
    m.down_proj = nn.Parameter(distribute_tensor(m.down_proj.data, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="convert parameters before they are sharded"):
        keep_converted(m, "transposed", NAMES)


def test_parameters_that_an_optimizer_has_are_refused() -> None:
    m = GptOss()
    optimizer = torch.optim.Adam([{"params": [m.down_proj]}])
    with pytest.raises(ValueError, match="convert parameters before an optimizer is created"):
        keep_converted(m, "transposed", NAMES)
    assert m.down_proj is optimizer.param_groups[0]["params"][0]


def test_parameters_with_an_adapter_are_refused() -> None:
    m = GptOss()
    torch.nn.utils.parametrize.register_parametrization(m, "down_proj", nn.Identity())
    with pytest.raises(ValueError, match="down_proj has a parametrization or an adapter in this"):
        keep_converted(m, "transposed", NAMES)


def test_dtensor_parameters(gloo_of_one: None, given: tuple[Tensor, Tensor, Tensor]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    m, mesh = GptOss(), init_device_mesh("cpu", (1,))
    sharded = [nn.Parameter(distribute_tensor(w.data, mesh, [Shard(0)])) for w in m.weights()]
    options = dict(activation=ACT, layout="transposed_interleaved")
    want = grouped_experts(*given, *m.weights(), **options)
    out = grouped_experts(*given, *sharded, **options)
    assert torch.equal(out, want) and not isinstance(out, DTensor)
    want.sum().backward()
    out.sum().backward()
    for w, twin in zip(sharded, m.weights(), strict=True):
        assert isinstance(w.grad, DTensor) and torch.equal(w.grad.full_tensor(), twin.grad)


def test_example_runs() -> None:
    result = doctest.testmod(layouts)
    assert result.attempted == 8 and not result.failed
