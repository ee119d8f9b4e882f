"""Kernels that wait for rows: begun before tokens are pushed, they give the same bits as after."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.sm90.exchange.peer_buffers import MAX_RANKS, SEEN_BYTES
from phalanx.kernels.sm90.exchange.push import push, wait_peers
from phalanx.kernels.sm90.exchange.waves import ready_words
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from tests.kernels.sm90.exchange.test_push_gpu import CANARY, Ranks, _routing

pytestmark = pytest.mark.gpu
ACT = Activation("swiglu")


def _words(ranks: Ranks, rank: int, local: int, waves: int) -> torch.Tensor:
    buffers = ranks.buffers[rank]
    return ready_words(
        ranks.flags[rank].data_ptr() + 4 * MAX_RANKS,
        buffers.state.data_ptr() + SEEN_BYTES,
        buffers.report.data_ptr(),
        limit_ms=buffers.limit_ms,
        ranks=ranks.R,
        wave_stride=MAX_RANKS,
        experts=local,
        waves=waves,
    ).cuda()


@pytest.mark.parametrize("waves", [1, 3, 4])
@pytest.mark.parametrize(("R", "K"), [(1, 2), (2, 4)])
def test_rows_are_multiplied_as_they_come(R: int, K: int, waves: int) -> None:
    """Rank 0's kernels, launched while the pushes of all ranks sleep."""
    T, D, F, local = 700, 1024, 512, 6
    g = torch.Generator("cuda").manual_seed(R)
    ranks = Ranks(R, T, D, side_words=4)
    tokens = [torch.randn(T, D, generator=g, device="cuda").bfloat16() for _ in range(R)]
    side = torch.zeros(4, dtype=torch.int32, device="cuda")
    w1 = torch.randn(local, 2 * F, D, generator=g, device="cuda").bfloat16() / 32
    w2 = torch.randn(local, D, F, generator=g, device="cuda").bfloat16() / 32
    words = _words(ranks, 0, local, waves)
    pushing = torch.cuda.Stream(priority=-1)
    for again in range(4):
        tables = _routing(R, T, K, R * local, 0.2, g)
        prob = torch.rand(R * T, K, generator=g, device="cuda")
        rows = dict(first_expert=0, local_experts=local, rows=R * T * K, backend="fused")
        plan = make_plan(torch.cat(tables), prob, **rows)
        how = dict(index_S=plan.row_index_S, prob_S=plan.row_prob_S)
        ranks.rows[0].fill_(CANARY)
        torch.cuda.synchronize()
        pushing.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(pushing):
            options = dict(tokens=T, local_experts=local, ctas=4, waves=waves)
            for r in range(R):
                push(tokens[r], tables[r], side, ranks.buffers[r], **options)
                torch.cuda._sleep(2_000_000)
        wait_peers(ranks.buffers[0], part=0)
        got = fc1_act(ranks.rows[0], w1, plan.offsets, ACT, ready=words, **how)
        h = got[0]
        grads = fc2_dgrad_dact(ranks.rows[0], w2.mT, h, plan.offsets, ACT, ready=words, **how)
        torch.cuda.synchronize()
        for r in range(1, R):
            wait_peers(ranks.buffers[r], part=waves)
        wanted = fc1_act(ranks.rows[0], w1, plan.offsets, ACT, **how)
        others = fc2_dgrad_dact(ranks.rows[0], w2.mT, h, plan.offsets, ACT, **how)
        used = int(plan.offsets[-1])
        for ours, theirs in zip((*got, *grads), (*wanted, *others), strict=True):
            if ours.shape[0] != R * T * K:  # partial sums: rows are columns
                ours, theirs = ours.T, theirs.T
            assert torch.equal(ours[:used], theirs[:used]), again


def test_only_rows_of_an_index_can_be_waited_for() -> None:
    x = torch.zeros(64, 64, device="cuda").bfloat16()
    w1 = torch.zeros(1, 128, 64, device="cuda").bfloat16()
    offsets = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    words = torch.zeros(6, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="ready: .* must be gathered"):
        fc1_act(x, w1, offsets, ACT, ready=words)
