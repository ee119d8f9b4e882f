"""The overlap of the experts' kernels with the transfers of a call over `symm`.

Legend: D hidden, K expert ids of a token, N received rows, S expert rows, F expert width.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.calls import Rows, tensors_of
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.parallel.dispatcher.transfers import LayerCall, Phase

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.waves import TileSignal


class ExpertOverlap:
    """`kernels.expert_mlp.interfaces.Overlap` of one call of a layer."""

    def __init__(self, call: LayerCall) -> None:
        self._call = call
        self._fc2: tuple[TileSignal, ExpertPlan, torch.cuda.Event] | None = None
        """Signal and plan of fc2, and the work before its launch, between start and finish."""

    @property
    def ready(self) -> Tensor:
        """Flags that kernels wait for before they read tokens, or gradients of sums."""
        return self._call.exchange.ready_words(self._call.local)

    def wait_rows(self) -> None:
        call = self._call
        (call.sum_grads if call.phase is Phase.SUM_GRADS else call.tokens).wait_rows()

    def start_sums(self, a_SF: Rows, hidden: int, plan: ExpertPlan, training: bool) -> Any:
        """Prepare fc2 of a_SF, whose sums are sent as it computes them; returns its tile signal."""
        call = self._call
        tokens = call.tokens.wait()
        if call.keep and training:
            buffer = call.rows(tokens) if call.fp8 is None else call.packed_rows(tokens)
            call.saved_tokens = buffer.clone()
        y_SD = call.exchange.rows(tokens).new_empty(len(tensors_of(a_SF)[0]), hidden)
        signal = call.exchange.tile_signal(y_SD, a_SF, call.summed)
        self._fc2 = signal, plan, torch.cuda.current_stream().record_event()
        return signal

    def finish_sums(self) -> Tensor:
        """Start to send the sums of fc2, after its launch; returns their receive buffer."""
        call = self._call
        assert self._fc2 is not None
        signal, plan, before = self._fc2
        self._fc2 = None
        transfer, call.send_rest = call.exchange.send_sums(
            signal, *call.expert_rows(plan), before, **call.send_options
        )
        call.phase = Phase.SUMS
        return call.sums.put_rows(transfer, call.rows(transfer))

    def send_gradient(
        self, dx_SD: Tensor | None, dprob_NK: Tensor | None, plan: ExpertPlan
    ) -> Tensor | None:
        """Send gradients of received tokens and of their probabilities back, if there are any.

        Ends the transfer of the gradient of the sums.
        """
        call = self._call
        if call.sum_grads.started:
            call.sum_grads.wait()
        if dx_SD is None:
            return None
        transfer = call.exchange.send_gradient(
            dx_SD, *call.expert_rows(plan), call.grad_side(dprob_NK), **call.send_options
        )
        call.phase = Phase.TOKEN_GRADS
        rows_ND = call.token_grads.put_rows(transfer, call.rows(transfer))
        call.exchange.wait_running(transfer)
        return rows_ND

    def tokens(self) -> Rows:
        call = self._call
        if call.fp8 is None:
            return call.saved_tokens if call.keep else call.rows(call.tokens.wait())
        packed = call.saved_tokens if call.keep else call.packed_rows(call.tokens.wait())
        assert packed is not None
        return call.fp8.tokens(packed, call.hidden)

    def tokens_first(self) -> Rows:
        """Received tokens, before the gradient of the sums is read.

        Exchanges are waited for in order, so that gradient has arrived too.
        """
        self._call.sum_grads.wait()
        return self.tokens()
