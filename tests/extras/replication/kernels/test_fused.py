"""Replicas in the fused backend: its launches and their order, on stand-ins."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, gather_pairs
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec
from tests.extras.replication.kernels.replicas import Copied, compare, experts_of, with_replicas
from tests.kernels.problems import Problem, make, random_choice
from tests.kernels.sm90.experts import test_backend
from tests.kernels.sm90.experts.test_backend import (
    ACT,
    WORDS,
    launches,
    reference,
    stand_ins,  # noqa: F401 - a fixture
)


def replicas_problem(act: Activation = ACT, *, bias: bool) -> Problem:
    """Six places, of which one guest's is empty."""
    choice = random_choice(60, 3, [0, 1, 3, 5])
    return make(act, torch.float32, bias=bias, choice=choice, L=6, rows=200)


ORDER = torch.tensor([5, 1, 0, 4, 3, 2], dtype=torch.int32)


@pytest.mark.parametrize("act", [ACT, Activation("squared_relu")], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_replicas_are_a_second_launch(bias: bool, act: Activation) -> None:
    margins = Margins(8, 16, 24)
    spec = MLPSpec(act, "fused", margins, accumulate=True)
    compare(replicas_problem(act, bias=bias), 4, spec, order=ORDER)
    names = ["fc1_act", "grouped_gemm", "fc2_dgrad_dact", "grouped_gemm", "wgrad", "wgrad"]
    alone = [(name, margin) for name, margin in launches[12:]]
    assert alone == list(zip(names, (8, 8, 16, 16, 24, 24), strict=True))
    twice = [(name, margin) for name, margin in launches[:12]]
    assert twice == [one for pair in alone[:4] for one in (pair, pair)] + alone[4:] * 2


class Recorded:
    """An `Overlap` that tells the order of calls, of one rank to itself."""

    ready = torch.zeros(6, dtype=torch.int64)

    def __init__(self, x: Tensor, log: list) -> None:
        self._x, self._log = x, log

    def wait_rows(self) -> None:
        self._log.append("wait_rows")

    def start_sums(self, a_SF: Tensor, hidden: int, plan: ExpertPlan, training: bool) -> Any:
        self._log.append("start_sums")
        self._sums = a_SF.new_full((len(self._x), hidden), torch.nan)
        self._signal = SimpleNamespace()
        return self._signal

    def finish_sums(self) -> Tensor:
        self._log.append("finish_sums")
        return self._sums

    def send_gradient(self, dx_SD: Tensor, dprob_NK: Tensor, plan: ExpertPlan) -> Tensor:
        self._log.append("send_gradient")
        # What is left of the sums has been sent long before, with replicas' rows.
        self._sums.copy_(reference.combine(self._signal.out_SN, plan.inverse_NK))
        self.dprob_NK = dprob_NK
        return reference.combine(dx_SD, plan.inverse_NK)

    def tokens(self) -> Tensor:
        self._log.append("tokens")
        return self._x

    def tokens_first(self) -> Tensor:
        self._log.append("tokens_first")
        return self._x


FORWARD = """send_weights_fc1 fc1_act wait_fc1 wait_rows fc1_act
    start_sums grouped_gemm finish_sums wait_fc2 grouped_gemm"""
BACKWARD = """{} send_gradient grad_buffer {} wgrad send_grads_fc1 wgrad send_grads_fc2
    wgrad reduce_grads_fc1 wgrad reduce_grads_fc2"""
AGAIN = {
    False: BACKWARD.format(
        "send_weights_fc2 fc2_dgrad_dact wait_fc2 wait_rows fc2_dgrad_dact "
        "grouped_gemm wait_fc1 grouped_gemm",
        "tokens",
    ),
    True: BACKWARD.format(
        """send_weights_fc1 tokens_first fc1_act wait_fc1 fc1_act
        fc2_dgrad_dact wait_fc2 fc2_dgrad_dact grouped_gemm grouped_gemm""",
        "",
    ),
}

WAITING = (
    ("wait_fc1 wait_rows fc1_act", "wait_rows fc1_act ready"),
    ("wait_fc2 wait_rows fc2_dgrad_dact", "wait_rows fc2_dgrad_dact ready wait_fc2"),
    ("wait_fc1 fc1_act", "fc1_act ready"),
    ("grouped_gemm grouped_gemm", "grouped_gemm wait_fc1 grouped_gemm"),
)
"""Kernels wait for weights themselves. Readers of biases, or of fc1 in recompute, wait for them
all."""


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_replicas_come_and_go_beside_exchanges(
    recompute: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list = []
    monkeypatch.setattr(test_backend, "launches", log)
    p, how = replicas_problem(bias=True), dict(accumulate=True, recompute_h=recompute)
    spec = MLPSpec(ACT, "fused", **how)
    want, _ = compare(p, 4, spec)
    log.clear()
    overlap = Recorded(p.x, log)
    theirs = experts_of(p, slice(4, None))
    replicas = Copied(theirs, log=log, words=WORDS if waits else None)
    got = with_replicas(p, 4, spec, replicas=replicas, overlap=overlap)
    names = [one.replace(" ", "_") if isinstance(one, str) else one[0] for one in log]
    expected = " ".join(f"{FORWARD} {AGAIN[recompute]}".split())
    for one, other in WAITING if waits else ():
        expected = expected.replace(one, other)
    assert " ".join(names) == expected
    dprob_NK = gather_pairs(want["dprob"], p.inverse)
    assert torch.equal(overlap.dprob_NK, dprob_NK)
    for name in got.keys() - {"dprob"}:
        assert torch.equal(got[name], want[name]), name
