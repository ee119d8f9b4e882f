"""Grouped GEMMs over living blocks on a Hopper GPU: the bits of the dense kernels, whose other
blocks are zero.

A product with zeros leaves a sum in fp32 as it is, and the blocks that are left come in the same
order. So every case compares all bits, and the dense kernels are compared with fp64 elsewhere
(`tests.kernels.sm90`). Memory that must not be written is filled before.

Legend: S rows, D hidden, F expert width, H = 2F, L experts.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.extras.block_sparse.kernels.backend import LivingExperts
from phalanx.extras.block_sparse.kernels.gemm import Plain, sparse_gemm
from phalanx.extras.block_sparse.kernels.lists import BLOCK, Blocks
from phalanx.extras.block_sparse.kernels.wgrad import sparse_wgrad
from phalanx.kernels.expert_mlp.calls import ExpertRows, Operand
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad
from phalanx.kernels.sm90.gemm.tiles import configured
from phalanx.kernels.sm90.wgrad.wgrad import wgrad
from tests.extras.block_sparse.kernels.test_lists import drawn
from tests.kernels.problems import SWIGLU
from tests.kernels.sm90.gemm.contract import check_equal
from tests.kernels.sm90.gemm.gemm_problems import COUNTS, Outputs, prefilled

pytestmark = pytest.mark.gpu
F, WIDE = 384, 640
# Shares of the blocks; with one block of an expert most tiles have none.
SHARES = {"all": 1.0, "half": 0.5, "a quarter": 0.25, "one": 0.0}


def spread(mask: Tensor) -> Tensor:
    return mask.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)


class Experts:
    """Operands with dead blocks of zeros, rows picked by an index or not."""

    def __init__(self, counts: list[int], share: float, *, gather: bool, seed: int = 0) -> None:
        g = torch.Generator("cuda").manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device="cuda").bfloat16()

        L, used = len(counts), sum(counts)
        S = used + 77
        ends = torch.tensor([0, *counts]).cumsum(0)
        self.offsets, self.used = ends.to("cuda", torch.int32), used
        self.index = torch.randint(0, S, (S,), generator=g, device="cuda").int() if gather else None
        self.x, self.dy, self.h = draw(S, WIDE), draw(S, WIDE), draw(S, 2 * F)
        self.dh, self.a = draw(S, 2 * F), draw(S, F)
        self.prob = torch.rand(S, generator=g, device="cuda")
        self.w1, self.w2 = draw(L, 2 * F, WIDE), draw(L, WIDE, F)
        f, d = F // BLOCK, WIDE // BLOCK
        living = max(1, round(share * f * d))
        fc1, fc2 = drawn(L, f, d, living, 1).cuda(), drawn(L, d, f, living, 2).cuda()
        self.fc1, self.fc2 = Blocks(fc1, 2), Blocks(fc2)
        self.mask1, self.mask2 = spread(torch.cat([fc1, fc1], 1)), spread(fc2)
        self.w1 *= self.mask1
        self.w2 *= self.mask2

    def sparse(self, **how: Any) -> Outputs:
        """All GEMMs over the lists."""
        at = self.offsets
        with prefilled():
            up = sparse_gemm(
                *(self.x, self.w1, self.fc1.forward, at, Act(SWIGLU)),
                index_S=self.index,
                prob=self.prob,
                **how,
            )
            down = sparse_gemm(self.a, self.w2, self.fc2.forward, at, Plain(), **how)
            grad = sparse_gemm(
                *(self.dy, self.w2.mT, self.fc2.backward, at, ActGrad(SWIGLU)),
                loaded=self.h,
                index_S=self.index,
                prob=self.prob,
                **how,
            )
            dx = sparse_gemm(self.dh, self.w1.mT, self.fc1.backward, at, Plain(), **how)
        grad = {"dh": grad["dh"], "da": grad["a"], "dprob": grad["dprob"]}
        return up | {"y": down["y"]} | grad | {"dx": dx["y"]}

    def dense(self) -> Outputs:
        """The same of the dense kernels, in tiles of as many columns, which partial sums follow."""
        at, gather = self.offsets, self.index is not None
        own, back = (configured("pp128", transposed=t) for t in (False, True))
        how: dict[str, Any] = dict(index_S=self.index, prob_S=self.prob)
        with prefilled():
            h, a = fc1_act(
                *(self.x, self.w1, at, SWIGLU),
                **how,
                loop=configured("co256", gather=gather, transposed=False),
            )
            y = grouped_gemm(self.a, self.w2, at, loop=own)
            dh, da, dprob = fc2_dgrad_dact(
                *(self.dy, self.w2.mT, self.h, at, SWIGLU),
                **how,
                loop=configured("pp128", gather=gather, transposed=True),
            )
            dx = grouped_gemm(self.dh, self.w1.mT, at, loop=back)
        return {"h": h, "a": a, "y": y, "dh": dh, "da": da, "dprob": dprob, "dx": dx}

    def rows(self, name: str) -> ExpertRows:
        gather = self.index is not None
        if name == "w1":
            operands = Operand(self.dh, parts=2), Operand(self.x, gather=gather)
        else:
            operands = Operand(self.dy, gather=gather), Operand(self.a)
        return ExpertRows(*operands, self.offsets, self.index)


@pytest.mark.parametrize("gather", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("counts", COUNTS)
def test_products_are_those_of_the_dense_kernels(counts, share, gather):
    p = Experts(COUNTS[counts], SHARES[share], gather=gather)
    check_equal(p.sparse(), p.dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gather", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("counts", COUNTS)
def test_weight_gradients_are_those_of_living_blocks(counts, share, gather, dtype):
    p = Experts(COUNTS[counts], SHARES[share], gather=gather)
    for name, weight, mask, blocks in (("w1", p.w1, p.mask1, p.fc1), ("w2", p.w2, p.mask2, p.fc2)):
        rows, start = p.rows(name), torch.randint(-9, 9, weight.shape, device="cuda").to(dtype)
        for add in (False, True):
            made = sparse_wgrad(rows, blocks.tiles, start.clone(), accumulate=add)
            d, v, offsets, index = rows
            how: dict[str, Any] = dict(index_S=index, accumulate=add, tile=BLOCK)
            want = wgrad(d, v, offsets, out_LOI=start.clone(), **how)
            want = torch.where(mask, want, start if add else 0)
            assert torch.equal(made, want), (name, add)


def test_bits_do_not_depend_on_who_computes():
    p = Experts(COUNTS["many"], 0.4, gather=True)
    first = p.sparse()
    for margin in (8, 32, 131, 32, 0, 0):
        check_equal(p.sparse(options=LaunchOptions(margin)), first)
        made = sparse_wgrad(
            *(p.rows("w1"), p.fc1.tiles, torch.empty_like(p.w1)), options=LaunchOptions(margin)
        )
        want = sparse_wgrad(p.rows("w1"), p.fc1.tiles, torch.empty_like(p.w1))
        assert torch.equal(made, want)


def test_a_graph_serves_every_mask_and_routing():
    p = Experts([300, 200, 100, 400], 0.5, gather=True)
    p.sparse()  # compiles
    out, graph = torch.empty_like(p.w1), torch.cuda.CUDAGraph()
    sparse_wgrad(p.rows("w1"), p.fc1.tiles, out)
    with torch.cuda.graph(graph):
        replayed = p.sparse()
        sparse_wgrad(p.rows("w1"), p.fc1.tiles, out)
    g = torch.Generator().manual_seed(0)
    for number, share in enumerate((0.25, 1.0, 0.5, 0.1) * 5):
        f, d = F // BLOCK, WIDE // BLOCK
        living = round(share * f * d)
        fc1, fc2 = (drawn(4, *of, living, number).cuda() for of in ((f, d), (d, f)))
        p.fc1.update(fc1)
        p.fc2.update(fc2)
        p.w1.copy_(torch.randn_like(p.w1) * spread(torch.cat([fc1, fc1], 1)))
        p.w2.copy_(torch.randn_like(p.w2) * spread(fc2))
        cuts = torch.randint(0, p.used + 1, (4,), generator=g).sort().values
        p.offsets[1:].copy_(cuts.int())
        graph.replay()
        check_equal(
            {k: replayed[k][..., : cuts[-1], :] for k in ("h", "y", "dx")},
            {k: v[..., : cuts[-1], :] for k, v in p.dense().items() if k in ("h", "y", "dx")},
        )
        want = wgrad(*p.rows("w1")[:3], index_S=p.index, tile=BLOCK, dtype=out.dtype)
        assert torch.equal(out, want * spread(torch.cat([fc1, fc1], 1)))


def test_the_whole_mlp():
    """Through autograd, as the layer calls it; other tiles leave no other bits."""
    p = Experts(COUNTS["ragged"], 0.4, gather=False)
    plan = ExpertPlan(None, p.prob, p.offsets, None)
    made: list[tuple[Tensor, ...]] = []
    for experts in ({}, {"experts": LivingExperts(p.fc1, p.fc2)}):
        leaves = [t.detach().clone().requires_grad_() for t in (p.x, p.w1, p.w2)]
        weights, spec = MLPWeights(*leaves[1:]), MLPSpec(SWIGLU, "fused")
        out = grouped_mlp(leaves[0], weights, plan, spec, **experts)
        dx, dw1, dw2 = torch.autograd.grad(out, leaves, p.dy)
        made.append((out[: p.used], dx[: p.used], dw1 * p.mask1, dw2 * p.mask2))
        if experts:
            assert not dw1[~p.mask1].any() and not dw2[~p.mask2].any()
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)
