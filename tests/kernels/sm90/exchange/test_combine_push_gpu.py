"""`combine_push` with several ranks on one GPU: the bits of `rows`, `combine` and `push`."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.sm90.exchange.combine_push import combine_push
from phalanx.kernels.sm90.exchange.push import wait_peers
from phalanx.kernels.sm90.exchange.waves import PROGRESS, ReadyRows, TileSignal
from phalanx.kernels.sm90.experts.combine import combine
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from tests.kernels.sm90.exchange.test_push_gpu import CANARY, Ranks, _routing

pytestmark = pytest.mark.gpu
SHARED, PINGPONG = Mainloop(256), Mainloop(192, pingpong=True)
BEGIN, REST = 3, 20
"""CTAs of the two launches."""


class Way:
    """The way back of all ranks, on two streams."""

    def __init__(
        self, R: int, T: int, D: int, K: int, F: int, local: int, waves: int, bits: int = 0
    ) -> None:
        self.R, self.T, self.K, self.local, self.waves, self.bits = R, T, K, local, waves, bits
        self.g = torch.Generator("cuda").manual_seed(R + D)
        self.ranks = Ranks(R, T, D, side_words=4)
        shape = (R, local, D, F)
        self.w2 = torch.randn(shape, generator=self.g, device="cuda").bfloat16() / 16
        self.bias = torch.randn(R, local, D, generator=self.g, device="cuda").bfloat16()
        self.progress = torch.zeros(R, PROGRESS, dtype=torch.int32, device="cuda")
        self.a = torch.zeros(R, R * T * K, F, device="cuda").bfloat16()
        self.pushing = torch.cuda.Stream(priority=-1)

    def draw(self, absent: float, experts: int) -> None:
        """Routing to the first `experts` of all, and what the experts multiply."""
        tables = _routing(self.R, self.T, self.K, experts, absent, self.g)
        self.table = torch.cat(tables)
        prob = torch.rand(self.table.shape, generator=self.g, device="cuda")
        size = dict(local_experts=self.local, rows=self.table.numel(), backend="fused")
        self.plans = [
            make_plan(self.table, prob, first_expert=r * self.local, **size) for r in range(self.R)
        ]
        self.a.normal_(generator=self.g)

    def send(self, loop: Mainloop, bias: bool) -> None:
        here = torch.cuda.current_stream()
        for r, plan in enumerate(self.plans):
            out = torch.full((self.a.shape[1], self.w2.shape[2]), CANARY, device="cuda").bfloat16()
            signal = TileSignal(out, self.progress[r], self.waves, loop, BEGIN, 0.5, self.bits)
            given = (
                signal.ready_rows,
                plan.row_index_S,
                plan.inverse_NK,
                plan.offsets,
                self.ranks.buffers[r],
            )
            how = dict(tokens=self.T, total_ctas=BEGIN + REST)
            begun = here.record_event()
            scaled = dict(bias_LN=self.bias[r], scale_S=plan.row_prob_S) if bias else {}
            grouped_gemm(self.a[r], self.w2[r], plan.offsets, signal=signal, **scaled)
            self.pushing.wait_event(begun)
            with torch.cuda.stream(self.pushing):
                combine_push(*given, ctas=BEGIN, **how)
            combine_push(*given, ctas=REST, **how)
            here.wait_stream(self.pushing)
        for buffers in self.ranks.buffers:
            wait_peers(buffers)

    def check(self, loop: Mainloop, bias: bool) -> None:
        D, T = self.w2.shape[2], self.T
        for source, plan in enumerate(self.plans):
            scaled = dict(bias_LN=self.bias[source], scale_S=plan.row_prob_S) if bias else {}
            y = grouped_gemm(self.a[source], self.w2[source], plan.offsets, loop=loop, **scaled)
            sums = combine(y, plan.inverse_NK)
            named = (plan.inverse_NK >= 0).any(1)
            for target in range(self.R):
                of = slice(target * T, (target + 1) * T)
                wanted = torch.full((T, D), CANARY, device="cuda").bfloat16()
                wanted[named[of]] = sums[of][named[of]]
                got = self.ranks.rows[target][source * T : (source + 1) * T]
                assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)), (
                    source,
                    target,
                )
        assert not self.progress.any()


@pytest.mark.parametrize("loop", [SHARED, PINGPONG], ids=["shared", "ping-pong"])
@pytest.mark.parametrize("absent", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    ("R", "T", "D", "K", "F", "local", "waves", "bits"),
    [
        (1, 70, 64, 2, 64, 5, 1, 0),
        (2, 700, 448, 4, 320, 6, 5, 0),
        (4, 257, 2880, 4, 192, 40, 5, 0),
        (2, 300, 7168, 8, 128, 33, 3, 0),
        (2, 1000, 1024, 1, 1024, 64, 8, 0),
        (2, 3000, 2048, 2, 512, 4, 7, 2),
        (3, 1500, 1088, 1, 256, 1, 7, 4),
        (2, 900, 448, 4, 320, 6, 7, 2),
    ],
)
def test_sums_have_the_bits_of_kernels_one_after_the_other(
    R: int,
    T: int,
    D: int,
    K: int,
    F: int,
    local: int,
    waves: int,
    bits: int,
    absent: float,
    loop: Mainloop,
) -> None:
    way = Way(R, T, D, K, F, local, waves, bits)
    for again in range(3):
        for received in way.ranks.rows:
            received.fill_(CANARY)
        # At last all to the first rank: others have nothing to send.
        way.draw(absent, local if again == 2 else R * local)
        way.send(loop, bias=again == 1)
        way.check(loop, bias=again == 1)
    assert all(buffers.state.tolist()[:2] == [3, 3] for buffers in way.ranks.buffers)


@pytest.mark.parametrize("absent", [0.0, 0.4, 1.0])
def test_gradients_take_side_data_along(absent: float) -> None:
    way = Way(4, 257, 2880, 4, 192, 40, 1)
    way.draw(absent, 160)
    sides = (
        torch.arange(16, device="cuda").int() + 100 * torch.arange(4, device="cuda").int()[:, None]
    )
    for r, plan in enumerate(way.plans):
        y = grouped_gemm(way.a[r], way.w2[r], plan.offsets)
        of = (plan.row_index_S, plan.inverse_NK, plan.offsets, way.ranks.buffers[r])
        how = dict(tokens=way.T, ctas=BEGIN, total_ctas=BEGIN)
        combine_push(ReadyRows(y, way.progress[r]), *of, **how, side=sides[r])
    for buffers in way.ranks.buffers:
        wait_peers(buffers)
    way.check(Mainloop(256), bias=False)
    for r, side in enumerate(way.ranks.side):
        assert torch.equal(side, sides.view(4, 4, 4)[:, r])


def test_captured_sums_go_on_counting() -> None:
    way = Way(2, 500, 1024, 4, 512, 5, 6, bits=2)
    way.draw(0.2, 10)
    way.send(PINGPONG, bias=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way.send(PINGPONG, bias=False)
    for _ in range(30):
        way.a.normal_(generator=way.g)
        for received in way.ranks.rows:
            received.fill_(CANARY)
        graph.replay()
        way.check(PINGPONG, bias=False)


def test_bad_arguments_are_named() -> None:
    way = Way(1, 8, 64, 2, 64, 4, 1)
    way.draw(0.0, 4)
    plan, buffers = way.plans[0], way.ranks.buffers[0]
    out = torch.zeros(16, 68, device="cuda").bfloat16()
    signal = TileSignal(out, way.progress[0], 1, PINGPONG, BEGIN, 0.5)
    how = dict(tokens=8, ctas=1, total_ctas=2)
    with pytest.raises(ValueError, match="y has 68 columns"):
        combine_push(
            signal.ready_rows, plan.row_index_S, plan.inverse_NK, plan.offsets, buffers, **how
        )
    signal = signal._replace(out_SN=out[:, :64].contiguous())
    with pytest.raises(ValueError, match="inverse must be"):
        combine_push(
            signal.ready_rows, plan.row_index_S, plan.inverse_NK[:3], plan.offsets, buffers, **how
        )
