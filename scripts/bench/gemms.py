"""A grouped GEMM that overlaps a push: fc1 of the experts, on all SMs but a margin."""

import math

import torch

from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.scripts.bench.measure import Launches
from phalanx.scripts.bench.models import Model
from phalanx.scripts.bench.problems import balanced, experts

_EXPERTS = 8


class Gemms(Launches):
    """`measure.BackgroundLoad`: launches of `fc1_act` that outlast a timed call.

    Args:
        model: sizes of the experts.
        tokens: tokens of a rank.
        sms: SMs that are left free.
        ms: least duration of the launches.
    """

    def __init__(self, model: Model, tokens: int, sms: int, ms: float) -> None:
        super().__init__()
        self._sms, self._act = sms, model.activation
        rows = tokens * model.top_k // 2
        shape = (rows, model.hidden, model.ffn, _EXPERTS)
        device = torch.device("cuda", torch.cuda.current_device())
        p = experts(shape, balanced(rows, _EXPERTS), device)
        self._x_SD, self._w1, self._offsets = p.x_SD, p.w1, p.offsets
        self._stream.wait_stream(torch.cuda.current_stream())
        self._launches = 1
        # One more launch than that: the last one must still run when the push ends.
        self._launches = 1 + math.ceil(ms / self.trial())

    def launch(self) -> None:
        for _ in range(self._launches):
            fc1_act(
                self._x_SD,
                self._w1,
                self._offsets,
                self._act,
                keep_h=False,
                sm_margin=self._sms,
            )
