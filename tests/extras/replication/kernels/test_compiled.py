"""Machine code of the kernels of expert replication: wide accesses, no spills."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from phalanx.extras.replication.kernels import rows_triton, weights_triton
from phalanx.extras.replication.kernels.rows import ExpertOwner
from phalanx.kernels.sm90.exchange.peer_buffers import STATE, PeerBuffers
from tests.kernels.triton_code import Code, launched

T, D, K, R, L, G, S = 4096, 2880, 4, 4, 8, 2, 40000


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


ADDRESSES = empty(R, dtype=torch.int64)
BUFFERS = PeerBuffers(*[ADDRESSES] * 3, empty(STATE), empty(4), rank=2, limit_ms=120_000)
HOME = ExpertOwner(2, L, L + G)


def code(module: Any, name: str, call: Any, folder: Path) -> Code:
    found = launched(module, name, call, folder)
    assert found.stack == 0, f"{name} spills"
    return found


def test_rows_are_parted(tmp_path: Path) -> None:
    table = empty(R * T, K)

    def part() -> None:
        rows_triton.split_returns(table, table, table, S, HOME)

    code(rows_triton, "split_returns_kernel", part, tmp_path)


def test_rows_are_added_up(tmp_path: Path) -> None:
    unreduced_rows, sums = (empty(n, T, D, dtype=torch.bfloat16) for n in (K, R))

    def add() -> None:
        rows_triton.sum_unreduced_rows(unreduced_rows, empty(T, K), empty(T, K), sums, HOME)

    code(rows_triton, "sum_unreduced_rows_kernel", add, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_and_their_gradients(dtype: torch.dtype, tmp_path: Path) -> None:
    own = empty(L, D, D, dtype=dtype)
    layer = own, empty(L, D, dtype=dtype), ADDRESSES, ADDRESSES
    taking = own, empty(R, G), ADDRESSES, BUFFERS
    # Besides pieces, two counts of programs and the number of the call; and a report.
    for name, narrow, call in (
        (
            "send_weights_kernel",
            3,
            lambda: weights_triton.send_weights(
                [layer] * 2, empty(R, G), empty(G + 1), BUFFERS, sms=132
            ),
        ),
        (
            "reduce_grads_kernel",
            3,
            lambda: weights_triton.reduce_grads(*taking, layer=0, sms=132),
        ),
    ):
        found = code(weights_triton, name, call, tmp_path)
        assert found.threads == 512
        assert found.count(r"STG\.E\.128") and found.count(r"LDGSTS\S*\.128")
        assert found.count(r"STG\.E(?!\.128)") == narrow
        assert found.count(r"BPT\.TRAP") == (name == "reduce_grads_kernel")


def test_gradients_are_reduced(tmp_path: Path) -> None:
    call = partial(weights_triton.send_grads, BUFFERS, 1)
    assert code(weights_triton, "signal_grads_kernel", call, tmp_path).threads == 32
