"""Experts over living blocks against the reference with the others at zero, on stand-ins.

The stand-ins follow the lists: of weights whose dead blocks are no zeros they multiply what is
listed, so that a wrong list, or one of another direction, shows.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from phalanx.extras.block_sparse.kernels import gemm, wgrad
from phalanx.extras.block_sparse.kernels.backend import (
    LivingExperts,
    SparseFused,
    skip_dead_blocks,
)
from phalanx.extras.block_sparse.kernels.lists import BLOCK, ROW_SHIFT, Blocks, Contraction
from phalanx.extras.block_sparse.masks import BlockMasks
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.calls import (
    ExpertRows,
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.expert_mlp.reference import Reference
from phalanx.kernels.launch_options import DEFAULT
from phalanx.kernels.sm90.experts.backend import Fused
from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad
from phalanx.parallel.dispatcher.transport_class import Received
from tests.extras.block_sparse.kernels.test_lists import check, drawn
from tests.kernels.problems import SWIGLU, Problem, error, gradients, leaves_of, make, random_choice
from tests.kernels.sm90.experts.test_backend import stand_ins  # noqa: F401  (of other kernels)

SQUARED = Activation("squared_relu")
D, WIDTH, L = 512, 384, 3
reference = Reference()
seen: list[str] = []


def listed_alone(w_LNK: Tensor, listed: Contraction, parts: int) -> Tensor:
    """Weights of which only the blocks of a list are left."""
    mask = torch.zeros(*(size // BLOCK for size in w_LNK.shape[1:]))
    mask = mask.expand(len(w_LNK), -1, -1).clone()
    tiles = mask.shape[1] // parts
    for e, t, p in torch.ones(listed.block_LTP.shape).nonzero().tolist():
        if p < listed.count_LT[e, t]:
            mask[e, t::tiles, listed.block_LTP[e, t, p]] = 1
    return w_LNK * spread(mask)


def spread(mask: Tensor) -> Tensor:
    return mask.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)


def sparse_gemm(
    a: Tensor,
    b_LNK: Tensor,
    listed: Contraction,
    offsets: Tensor,
    epilogue: Any,
    *,
    loaded: Tensor | None = None,
    index_S: Tensor | None = None,
    options: Any = DEFAULT,
    bias: Tensor | None = None,
    prob: Tensor | None = None,
    scale: Tensor | None = None,
) -> dict[str, Tensor]:
    seen.append(type(epilogue).__name__)
    w = listed_alone(b_LNK, listed, epilogue.product_parts)
    plan = ExpertPlan(index_S, prob if scale is None else scale, offsets, None)
    if isinstance(epilogue, Act):
        assert epilogue.bias == (bias is not None) and epilogue.prob == (prob is not None)
        h, a = reference.fc1_act(Fc1Call(a, Linear(w, bias), plan, epilogue.act))
        return {"h": h, "a": a}
    if isinstance(epilogue, ActGrad):
        dy = Operand(a, gather=index_S is not None)
        call = Fc2DgradCall(dy, Linear(w.mT), loaded, plan, epilogue.act)
        dh, a, dprob, *_ = reference.fc2_dgrad_dact(call)
        return {"dh": dh, "a": a, "dprob": dprob[None]}
    assert epilogue.bias == (bias is not None) == (scale is not None)
    return {"y": reference.rows(RowsCall(a, Linear(w, bias), plan))}


def sparse_wgrad(
    rows: ExpertRows, tiles: Tensor, out: Tensor, *, accumulate: bool, options: Any
) -> Tensor:
    seen.append("wgrad")
    d, v, offsets, index_S = rows
    plan = ExpertPlan(index_S, None, offsets, None)
    made = reference.wgrad(WgradCall(d, v, plan, None))
    mask = torch.zeros(len(out), *(size // BLOCK for size in out.shape[1:]))
    for e, places in enumerate(tiles[1:].view(len(out), -1)[:, : tiles[0]].tolist()):
        for place in places:
            mask[e, place >> ROW_SHIFT, place & ((1 << ROW_SHIFT) - 1)] = 1
    made = made * spread(mask)
    return out.add_(made) if accumulate else out.copy_(made)


@pytest.fixture(autouse=True)
def _of_sparse_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "sparse_gemm", sparse_gemm)
    monkeypatch.setattr(wgrad, "sparse_wgrad", sparse_wgrad)
    seen.clear()


def run(p: Problem, backend: str, **how: Any) -> dict[str, Tensor]:
    leaves = leaves_of(p)
    weights = MLPWeights(*(leaves.get(name) for name in ("w1", "w2", "b1", "b2")))
    plan = ExpertPlan(p.index, leaves["prob"], p.offsets, p.inverse)
    out = grouped_mlp(leaves["x"], weights, plan, MLPSpec(p.act, backend), **how)
    return gradients(out, p.dout, leaves)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [SWIGLU, SQUARED], ids=lambda act: act.kind)
def test_equals_the_reference_without_dead_blocks(act, bias):
    choice = random_choice(40, 2, [0, 2])  # the second expert has no rows
    p = make(act, torch.float32, bias=bias, choice=choice, L=L, D=D, width=WIDTH, rows=90)
    parts = 2 if act.gated else 1
    # Every tile has a living block: those without one read a dead one, which is no zero here.
    e, f, k = torch.arange(L)[:, None, None], torch.arange(WIDTH // BLOCK), torch.arange(D // BLOCK)
    fc1, fc2 = (e + f[:, None] + k) % 3 == 0, (e + f + k[:, None]) % 3 == 1
    mask1, mask2 = spread(torch.cat([fc1] * parts, 1)), spread(fc2)
    living = Problem(**vars(p) | dict(w1=p.w1 * mask1, w2=p.w2 * mask2))
    want = run(living, "reference")
    want |= {"dw1": want["dw1"] * mask1, "dw2": want["dw2"] * mask2}
    got = run(p, "fused", experts=LivingExperts(Blocks(fc1, parts), Blocks(fc2)))
    assert {name: error(got[name], want[name]) < 1e-6 for name in want} == dict.fromkeys(want, True)
    assert seen == ["Act", "Plain", "ActGrad", "Plain", "wgrad", "wgrad"]


def test_other_backends_are_left_as_they_are():
    fc1, fc2 = Blocks(drawn(1, 2, 3, 4), 2), Blocks(drawn(1, 3, 2, 4))
    wrap = LivingExperts(fc1, fc2).start(MLPWeights(*torch.empty(2)), "fc1", None)
    assert wrap(reference) is reference
    made = wrap(Fused(DEFAULT))
    assert type(made) is SparseFused and type(wrap(made)) is SparseFused


def test_a_gradient_is_added_or_replaces():
    fc1, fc2 = Blocks(drawn(1, 2, 3, 4), 1), Blocks(drawn(1, 3, 2, 4))
    ops, out = SparseFused(DEFAULT, fc1, fc2), torch.full((1, 256, 384), 3.0)
    d, v = Operand(torch.ones(5, 256)), Operand(torch.ones(5, 384))
    plan = ExpertPlan(None, None, torch.tensor([0, 5], dtype=torch.int32), None)
    fresh = ops.wgrad(WgradCall(d, v, plan, None))
    assert fresh.unique().tolist() == [0, 5] and (fresh == 5).sum() == 4 * BLOCK**2
    assert torch.equal(ops.wgrad(WgradCall(d, v, plan, Buffer(out, True))), 3 + fresh)
    assert torch.equal(ops.wgrad(WgradCall(d, v, plan, Buffer(out, False))), fresh)


class Layer(torch.nn.Module):
    """Experts, as far as masks know them, that return what they got."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.Parameter(torch.ones(2, 2 * WIDTH, D))
        self.w2 = torch.nn.Parameter(torch.ones(2, D, WIDTH))
        self.spec, self.expert_dp_group = SimpleNamespace(channel_order=None), None

    def forward(self, received: Received) -> Received:
        return received


def test_lists_follow_the_masks_of_a_layer():
    layer = Layer()
    masks = BlockMasks(layer, BLOCK)
    assert skip_dead_blocks(layer, masks)
    plan = ExpertPlan(None, None, torch.zeros(3, dtype=torch.int32), None)
    experts = layer(Received(torch.empty(0, D), plan)).experts
    fc1, fc2 = experts._blocks
    check(fc1, masks.living_fc1)
    for seed in (1, 2):
        masks.living_fc1.copy_(drawn(2, WIDTH // BLOCK, D // BLOCK, 5, seed))
        masks.living_fc2.copy_(drawn(2, D // BLOCK, WIDTH // BLOCK, 4, seed))
        masks.changed()
        check(fc1, masks.living_fc1)
        check(fc2, masks.living_fc2)
    masks.want_all(True)  # of gradients alone
    assert fc1.tiles[0] == 2 * 12 and fc2.tiles[0] == 12
    assert fc1.forward.count_LT.sum() == 2 * 5 + (~masks.living_fc1.any(-1)).sum()
    masks.want_all(False)
    check(fc1, masks.living_fc1)
    replicas = object()
    assert layer(Received(torch.empty(0, D), plan, experts=replicas)).experts is replicas


def test_square_experts_are_refused():
    blocks = Blocks(drawn(1, 2, 2, 2))
    with pytest.raises(ValueError, match="experts of 256 x 256 channels: must differ"):
        SparseFused(DEFAULT, blocks, blocks)
