"""The exchanges of `symm` by collectives of gloo, so that `symm` moves rows on ranks of a CPU.

What a kernel would write on its way has come when a start returns. Memory that no peer writes holds
bytes that are NaN in bf16 and in FP8, so that no result may depend on it. Overlap is that of the
order of calls alone; the kernels that push, wait and signal are not here.

Legend: T tokens of a rank, D hidden, R ranks, N = R * T received rows.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.autograd import ExpertMLP, ExpertMLPArgs
from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.calls import RowsCall
from phalanx.kernels.expert_mlp.fp8 import EmulatedFP8
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.expert_mlp.reference import Reference
from phalanx.kernels.expert_mlp.torch_grouped import Grouped
from phalanx.kernels.sm90.exchange.peer_buffers import SLOTS
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher import symm, transport_class
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport_class import Received
from tests.parallel.surroundings import standing_for

NAN = 0xFF


class GlooExchange:
    """`kernels.sm90.exchange.exchange.Exchange`, as far as `symm` calls it."""

    def __init__(
        self,
        connections: Connections,
        group: dist.ProcessGroup,
        tokens: int,
        hidden: int,
        slots: int,
        options: SymmOptions,
    ) -> None:
        self._group, self.ranks, self.tokens = group, group.size(), tokens
        self._places = torch.empty(SLOTS, self.ranks * tokens, hidden, dtype=torch.bfloat16)
        self._started, self._waited, self.sent = 0, 0, list[int]()
        """Bytes of a row, by exchange."""

    def start(
        self,
        rows: Tensor,
        table: Tensor,
        side: Tensor,
        local: int,
        *,
        back: bool = False,
        all_sms: bool = False,
    ) -> Any:
        if not back:
            table_NK, came, side = self._gathered(table), self._gathered(rows), self._gathered(side)
            return self._put(came, self._here(table_NK, local, dist.get_rank(self._group)), side)
        return self._back(rows, self._here(table, local, dist.get_rank(self._group)), side)

    def tile_signal(self, y_SD: Tensor, a_SF: Any, local: int) -> Any:
        return SimpleNamespace(out_SN=y_SD)

    def send_sums(
        self,
        signal: Any,
        index_S: Tensor,
        inverse_NK: Tensor,
        *rest: Any,
        unreduced_rows: Any = None,
    ) -> tuple[Any, Any]:
        sums_ND = provider("torch").combine(signal.out_SN, inverse_NK)
        none = inverse_NK.new_empty(0)
        sent = self._back(sums_ND, (inverse_NK >= 0).any(1), none)
        return sent, lambda: unreduced_rows and unreduced_rows(signal.out_SN)

    def send_gradient(
        self,
        dx_SD: Tensor,
        index_S: Tensor,
        inverse_NK: Tensor,
        offsets: Tensor,
        side: Tensor,
        *,
        all_sms: bool = False,
        unreduced_rows: Any = None,
    ) -> Any:
        if unreduced_rows is not None:
            unreduced_rows(dx_SD)
        sums_ND = provider("torch").combine(dx_SD, inverse_NK)
        return self._back(sums_ND, (inverse_NK >= 0).any(1), side)

    def run_on_comm_stream(self, send: Callable[[], None]) -> Callable[[], None]:
        send()
        return lambda: None

    def wait(self, sent: Any, *, side_only: bool = False) -> None:
        assert sent.number >= self._waited, "exchanges are waited for in the order of their starts"
        self._waited = sent.number

    def wait_running(self, sent: Any) -> None:
        pass

    def rows(self, sent: Any) -> Tensor:
        return self._places[sent.slot]

    def side(self, sent: Any) -> Tensor:
        side: Tensor = sent.side.view(-1).view(torch.uint8)
        return side

    def ready_words(self, local: int) -> Tensor:
        return torch.empty(0)

    def _here(self, table_NK: Tensor, local: int, rank: int) -> Tensor:
        """bool [N]: rows with an expert of a rank."""
        return ((table_NK >= 0) & (table_NK // local == rank)).any(1)

    def _back(self, rows_ND: Tensor, mine_N: Tensor, side: Tensor) -> Any:
        """Rows `mine_N` and blocks of side data to the ranks of their tokens."""
        came = self._exchanged(rows_ND)
        return self._put(came, self._exchanged(mine_N), self._exchanged(side))

    def _put(self, rows: Tensor, written_N: Tensor, side: Tensor) -> Any:
        slot = self._started % SLOTS
        self._started += 1
        place = self._places[slot].view(torch.uint8).view(-1)
        place.fill_(NAN)
        bytes_NB = rows.view(torch.uint8)
        self.sent.append(bytes_NB.shape[1])
        # Rows follow one another, however long they are.
        place[: bytes_NB.numel()].view(bytes_NB.shape)[written_N] = bytes_NB[written_N]
        return SimpleNamespace(slot=slot, side=side, number=self._started)

    def _gathered(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.ranks * len(x), *x.shape[1:])
        if x.numel():
            dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
        return out

    def _exchanged(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            dist.all_to_all_single(out, x.contiguous(), group=self._group)
        return out


def experts(received: Received, weights: MLPWeights, spec: MLPSpec) -> Tensor:
    """`grouped_mlp` of what was received, also with overlap, which it refuses on a CPU."""
    plan, given, here = received.plan, received.fp8_inputs, received.experts
    with received.saving():
        if received.overlap is None:
            rows_ND = received.rows_ND
            return grouped_mlp(rows_ND, weights, plan, spec, fp8_inputs=given, experts=here)
        grads = torch.is_grad_enabled()
        how = ExpertMLPArgs(spec, grads, received.overlap, given, experts=here)
        return ExpertMLP.apply(received.rows_ND, *weights, None, plan, how)


@contextmanager
def gloo_exchanges(
    more: Callable[[Callable[..., Any]], list[Any]] = lambda _: [],
) -> Iterator[list[GlooExchange]]:
    """Context in which `symm` uses gloo exchanges, with any backend; yields the used exchanges.

    Args:
        more: patches over the cache of exchanges.
    """
    made = list[GlooExchange]()

    @functools.cache
    def exchange_of(*key: Any) -> GlooExchange:
        made.append(GlooExchange(*key[:6]))  # without the kind of pass
        return made[-1]

    def signalled(rows: Callable[[Any, RowsCall], Tensor]) -> Callable[[Any, RowsCall], Tensor]:
        """Writes to where sums leave, those of own experts before it is the replicas' turn."""

        def into_out(backend: Any, call: RowsCall) -> Tensor:
            out_SN = call.out if call.signal is None else call.signal.out_SN
            y_SN = rows(backend, call._replace(signal=None, out=None))
            if out_SN is None:
                return y_SN
            here = slice(int(call.plan.offsets[0]), int(call.plan.offsets[-1]))
            out_SN[here] = y_SN[here]
            return out_SN

        return into_out

    backends = (EmulatedFP8, Reference, Grouped)
    combine = SimpleNamespace(combine=provider("torch").combine)
    on = SimpleNamespace(record_event=lambda: None)
    with ExitStack() as stack:
        for patch in (
            standing_for("phalanx.kernels.sm90.experts.combine", combine),
            mock.patch.object(symm, "exchange_of", exchange_of),
            *more(exchange_of),
            mock.patch.object(torch.cuda, "current_stream", return_value=on),
            mock.patch.object(transport_class, "waits_for_tokens", return_value=True),
            *(mock.patch.object(b, "rows", signalled(b.rows)) for b in backends),
        ):
            stack.enter_context(patch)
        yield made
