"""`push` and `wait_peers`, several ranks on one GPU: what lands where, flags, epochs, capture."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.sm90.exchange.peer_buffers import ALLOWED, FLAGS, STATE, PeerBuffers
from phalanx.kernels.sm90.exchange.push import push, wait_peers

pytestmark = pytest.mark.gpu
CANARY = 7.0


class Ranks:
    """R ranks of one process; each has its receive buffers and its view of all others'."""

    def __init__(self, R: int, T: int, D: int, side_words: int, limit_ms: int = 5000) -> None:
        self.R, self.T, self.side_words = R, T, side_words
        self.rows = [torch.full((R * T, D), CANARY, device="cuda").bfloat16() for _ in range(R)]
        self.side = [torch.zeros(R, side_words, dtype=torch.int32, device="cuda") for _ in range(R)]
        self.flags = [torch.zeros(FLAGS, dtype=torch.int32, device="cuda") for _ in range(R)]
        for flags in self.flags:
            flags[ALLOWED:] = 1
        self.buffers = [
            PeerBuffers(
                *(_addresses(x) for x in (self.rows, self.side, self.flags)),
                torch.zeros(STATE, dtype=torch.int32, device="cuda"),
                torch.zeros(4, dtype=torch.int32).pin_memory(),
                rank,
                limit_ms,
            )
            for rank in range(R)
        ]

    def exchange(self, rows, tables, sides, **options) -> None:
        given = (rows, tables, sides, self.buffers)
        for row, table, side, buffers in zip(*given, strict=True):
            push(row, table, side, buffers, tokens=self.T, **options)
        for buffers in self.buffers:
            wait_peers(buffers, part=options.get("waves", 1))


def _addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], device="cuda")


def _routing(R: int, T: int, K: int, experts: int, absent: float, g) -> list[Tensor]:
    tables = []
    for _ in range(R):
        table = torch.rand(T, experts, generator=g, device="cuda").topk(K).indices.int()
        table[torch.rand(T, K, generator=g, device="cuda") < absent] = -1
        tables.append(table)
    return tables


def _expected(R, T, D, received: list[Tensor], table: list[Tensor], local: int, back: bool):
    """Expected rows of each rank."""
    wanted = [torch.full((R * T, D), CANARY, device="cuda").bfloat16() for _ in range(R)]
    for source in range(R):
        of = torch.where(table[source] >= 0, table[source] // local, -1)
        for target in range(R):
            if back:
                block = slice(target * T, (target + 1) * T)
                named = (of[block] == source).any(1)
                rows = received[source][block]
            else:
                named, rows = (of == target).any(1), received[source]
            wanted[target][source * T : (source + 1) * T][named] = rows[named]
    return wanted


@pytest.mark.parametrize("way", ["tokens", "tokens in waves", "sums"])
@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("R", "T", "D", "K", "local", "ctas"),
    [(1, 5, 8, 2, 4, 1), (2, 33, 64, 2, 2, 2), (4, 257, 2880, 4, 8, 16), (8, 96, 7168, 8, 4, 132)],
)
def test_every_row_lands_where_it_should_and_no_other(R, T, D, K, local, ctas, absent, way):
    back, waves = way == "sums", 3 if way == "tokens in waves" else 1
    g = torch.Generator("cuda").manual_seed(R + D)
    ranks = Ranks(R, T, D, side_words=8)
    N = R * T if back else T
    rows = [torch.randn(N, D, generator=g, device="cuda").bfloat16() for _ in range(R)]
    tables = _routing(R, N, K, R * local, absent, g)
    words = R * 8 if back else 8
    sides = [torch.arange(words, dtype=torch.int32, device="cuda") + 100 * r for r in range(R)]
    options = dict(local_experts=local, ctas=ctas, back=back, waves=waves)
    ranks.exchange(rows, tables, sides, **options)
    wanted = _expected(R, T, D, rows, tables, local, back)
    for r in range(R):
        assert torch.equal(ranks.rows[r].view(torch.int16), wanted[r].view(torch.int16))
        for source in range(R):
            block = sides[source][8 * r : 8 * r + 8] if back else sides[source]
            assert torch.equal(ranks.side[r][source], block)


def test_captured_exchanges_go_on_counting():
    R, T, D, K, local = 4, 64, 512, 2, 2
    g = torch.Generator("cuda").manual_seed(1)
    ranks = Ranks(R, T, D, side_words=4)
    rows = [torch.zeros(T, D, device="cuda").bfloat16() for _ in range(R)]
    tables = [torch.zeros(T, K, dtype=torch.int32, device="cuda") for _ in range(R)]
    sides = [torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(R)]
    options = dict(local_experts=local, ctas=4)
    ranks.exchange(rows, tables, sides, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranks.exchange(rows, tables, sides, **options)
    for _ in range(20):
        for table, row, new in zip(tables, rows, _routing(R, T, K, R * local, 0.3, g), strict=True):
            table.copy_(new)
            row.normal_()
        for received in ranks.rows:
            received.fill_(CANARY)
        graph.replay()
        wanted = _expected(R, T, D, rows, tables, local, back=False)
        for r in range(R):
            assert torch.equal(ranks.rows[r], wanted[r])
    state = ranks.buffers[0].state.tolist()
    assert state[:2] == [21, 21] and not any(state[2:])


def test_bad_arguments_are_named():
    ranks = Ranks(2, 4, 16, side_words=4)
    row = torch.zeros(4, 16, device="cuda").bfloat16()
    table = torch.zeros(4, 2, dtype=torch.int32, device="cuda")
    side = torch.zeros(3, dtype=torch.int32, device="cuda")
    sizes = dict(tokens=4, local_experts=2, ctas=1)
    both = (row.repeat(2, 1), table.repeat(2, 1))
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        push(row, table, side, ranks.buffers[0], **sizes)
    with pytest.raises(ValueError, match="waves=2: 1 to 8, and 1 on the way back"):
        push(*both, side[:0], ranks.buffers[0], **sizes, back=True, waves=2)
    with pytest.raises(ValueError, match="rows must be"):
        push(row[:3], table, side, ranks.buffers[0], **sizes)
