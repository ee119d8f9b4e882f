"""Kernel `dprob` on a Hopper GPU against a sum on the host."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.sm90.experts.fc2_dgrad_dact import dprob

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("counts", [[5, 0, 300, 1, 0], [0, 0], [1000], [3] * 500, [0, 0, 7]])
def test_sums_in_order_and_leaves_the_padding_at_zero(counts, gather, table):
    g = torch.Generator("cuda").manual_seed(0)
    used, L, N = sum(counts), len(counts), 200
    S = used + 99
    partial = torch.randn(5, S, generator=g, device="cuda")
    partial[:, used:] = float("nan")
    index = torch.randint(0, N, (S,), generator=g, device="cuda", dtype=torch.int32)
    index[used:] = 2**30
    terms = torch.randn(N if gather else S, L, generator=g, device="cuda")
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device="cuda")
    ours = dprob(
        partial,
        offsets,
        table_NL=terms if table else None,
        index_S=index if gather and table else None,
    )
    want = torch.zeros(S, device="cuda")
    for part in partial[:, :used]:
        want[:used] += part
    if table:
        expert = torch.arange(L).repeat_interleave(torch.tensor(counts)).cuda()
        row = index[:used].long() if gather else torch.arange(used, device="cuda")
        want[:used] += terms[row, expert]
    assert torch.equal(ours, want)
