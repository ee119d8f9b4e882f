"""The order of events of `symm`: no order breaks it, the model says what `symm` does, and can fail.

The model is tests/parallel/dispatcher/protocol.py. `symm` itself runs here on a CPU, over exchanges
that only write down who starts, waits and reads.
"""

import functools
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.sm90.exchange.peer_buffers import SLOTS, WAVES
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher import symm
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.symm import Symm
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Transport
from tests.parallel.dispatcher.gloo_exchange import experts
from tests.parallel.dispatcher.protocol import (
    Program,
    Violation,
    backward,
    explore,
    forward,
    run,
    step,
)

WAYS = [
    pytest.param(overlaps, beside, keep, id=f"{how}, {'kept' if keep else 'sent again'}")
    for overlaps, beside, how in (
        (True, True, "beside the experts"),
        (True, False, "stream of its own"),
        (False, False, "one stream"),
    )
    for keep in (False, True)
]


def stepped(ranks: int, overlaps: bool, beside: bool, keep: bool, slots: int = SLOTS) -> Program:
    """Two micro-batches of two layers."""
    program = Program(ranks, overlaps=overlaps, slots=slots)
    for _ in range(2):
        step(program, 2, overlaps=beside, keep=keep)
    return program


@pytest.mark.parametrize(("ranks", "runs"), [(2, 30), (3, 8), (4, 3)])
@pytest.mark.parametrize(("overlaps", "beside", "keep"), WAYS)
def test_no_order_of_events_breaks_it(
    overlaps: bool, beside: bool, keep: bool, ranks: int, runs: int
) -> None:
    explore(stepped(ranks, overlaps, beside, keep), runs)


def test_three_places_are_too_few_where_pushes_run_beside_the_experts() -> None:
    """The next layer's gradient of the sums comes to where this one's is still read."""
    with pytest.raises(Violation, match="which still reads exchange"):
        explore(stepped(2, True, True, False, slots=3), 60)


@pytest.mark.parametrize("unread", [3, 4])
def test_ranks_that_run_ahead_are_held_back(unread: int) -> None:
    """Whoever starts u when u - 3 has been read is safe, but only as pushes wait to be allowed.

    In a layer the exchanges that are met on the way hold ranks back as well.
    """
    program = Program(2)
    for u in range(1, 13):
        if u > unread:
            program.wait(u - unread)
            program.read(u - unread)
        program.start(back=True)
    if unread < SLOTS:
        return explore(program, 60)
    with pytest.raises(Violation, match="which still reads exchange"):
        explore(program, 60)


@pytest.mark.parametrize("reverse", [False, True])
def test_exchanges_are_waited_for_in_the_order_of_their_starts(reverse: bool) -> None:
    """Kernels look for waves of what was waited for last: that must be what they read."""
    program = Program(2)
    sums, x = program.start(back=True), program.start()
    if reverse:
        program.wait(x, side_only=True)
    program.wait(sums)
    program.read(sums)
    if not reverse:
        program.wait(x, side_only=True)
    program.read(x, waiting=True)
    if not reverse:
        return explore(program, 60)
    with pytest.raises(Violation, match="reads part . of exchange 2 .*, but finds exchange 0"):
        explore(program, 60)


def test_a_wait_before_the_start_is_a_deadlock() -> None:
    program = Program(2)
    program.start()
    program.wait(1)
    program.wait_running(2)
    program.start(back=True)
    with pytest.raises(Violation, match="deadlock"):
        run(program, 0)


@pytest.mark.parametrize("meet", [True, False])
def test_ranks_meet_before_places_are_taken_from_the_first_one_again(meet: bool) -> None:
    """Replays of a graph, whose exchanges need not fill all buffers."""
    program = Program(2)
    for _ in range(3):
        program.begin(meet=meet)
        step(program, 1, overlaps=True, keep=False)
    if meet:
        return explore(program, 60)
    with pytest.raises(Violation, match="which still reads exchange"):
        explore(program, 60)


R, T, D, E, K = 2, 4, 8, 16, 2
Calls = list[tuple[str, int, int]]


class Recorder:
    """An `Exchange` of R ranks that brings zeros, and side data from this rank alone."""

    ranks, tokens = R, T

    def __init__(self, overlaps: bool, hidden: int, dtype: torch.dtype) -> None:
        self.overlaps, self.calls, self._last = overlaps, Calls(), 0
        places = [torch.zeros(R * T, hidden, dtype=dtype) for _ in range(SLOTS)]
        self._places = [(rows_ND, torch.zeros(4096).byte()) for rows_ND in places]
        self._holds = dict[int, int]()
        self.made: Any = None

    def start(self, rows: Tensor, table: Tensor, side: Tensor, local: int, **how: bool) -> Any:
        self._last, slot = self._last + 1, self._last % SLOTS
        back = how.get("back", False)
        waves = min(WAVES, local) if self.overlaps and not back else 1
        blocks = side if back else side.repeat(R, 1)
        bits = blocks.view(torch.uint8).flatten()
        with _disable_current_modes():  # a push, no read
            self._places[slot][1][: len(bits)] = bits
        self._holds.update({t.untyped_storage().data_ptr(): self._last for t in self._places[slot]})
        self.calls.append(("start", self._last, waves))
        return SimpleNamespace(slot=slot, number=self._last, waves=waves, sources=(rows,))

    def tile_signal(self, y_SD: Tensor, a_SF: Any, local: int) -> Any:
        return SimpleNamespace(out_SN=y_SD)

    def send_gradient(
        self,
        dx_SD: Tensor,
        index_S: Tensor,
        inverse_NK: Tensor,
        offsets: Tensor,
        side: Tensor,
    ) -> Any:
        return self.start(dx_SD, inverse_NK, side, E // R, back=True)

    def send_sums(self, signal: Any, index_S: Tensor, inverse_NK: Tensor, *rest: Any) -> Any:
        sent = self.start(signal.out_SN, inverse_NK, inverse_NK.new_empty(0), E // R, back=True)
        self.made = weakref.ref(signal.out_SN)
        return sent, functools.partial(lambda _: None, signal)

    def wait(self, sent: Any, *, side_only: bool = False) -> None:
        self.calls.append(("wait", sent.number, 0 if side_only else sent.waves))

    def wait_running(self, sent: Any) -> None:
        self.calls.append(("running", sent.number, 0))

    def rows(self, sent: Any) -> Tensor:
        return self._places[sent.slot][0]

    def side(self, sent: Any) -> Tensor:
        return self._places[sent.slot][1]

    def ready_words(self, local: int) -> Tensor:
        return torch.empty(0)

    def look(self, given: Any) -> None:
        """Write down which exchanges an op reads."""
        for t in tree_leaves(given):
            u = self._holds.get(t.untyped_storage().data_ptr()) if isinstance(t, Tensor) else None
            if u and self.calls[-1] != ("read", u, 0):
                self.calls.append(("read", u, 0))


class Watch(TorchDispatchMode):
    """Tells a recorder what every op reads; a view or a shape is no read."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket is not torch.ops.aten.new_empty:
            self._recorder.look((args, kwargs))
        return func(*args, **(kwargs or {}))


class Planner:
    def check(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> None:
        pass

    def __call__(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor) -> ExpertPlan:
        how = dict(first_expert=0, local_experts=E // R, rows=R * T * K)
        return make_plan(topk_idx_NK, topk_prob_NK, **how)


@pytest.mark.parametrize("recipe", [None, Fp8Block()], ids=["rows as they are", "rows in FP8"])
@pytest.mark.parametrize(("overlaps", "beside", "keep"), WAYS)
def test_the_model_says_what_symm_does(
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool,
    beside: bool,
    keep: bool,
    recipe: Fp8Block | None,
) -> None:
    D, dtype = (8, torch.float32) if recipe is None else (64, torch.bfloat16)
    recorder = Recorder(overlaps, D, dtype)
    summed = SimpleNamespace(combine=lambda rows_ND, table_TR, **_: rows_ND[:T].clone())
    monkeypatch.setitem(sys.modules, "phalanx.kernels.sm90.experts.combine", summed)
    monkeypatch.setattr(symm, "exchange_of", lambda *_: recorder)
    stream = SimpleNamespace(record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    options = SymmOptions(keep=keep, comm_sms=8 * overlaps)
    group: Any = None
    context = DispatchContext(
        Transport("symm", "asked for"),
        group,
        Planner(),
        experts=E,
        local=E // R,
        local_slots=E // R,
        backend="fused" if beside else "torch",
        options=options,
        recipe=recipe,
        connections=Connections(),
    )
    transport = Symm(context)
    g = torch.Generator().manual_seed(0)
    w1, w2, x = (
        torch.randn(s, generator=g).to(dtype) for s in ((E // R, 2 * D, D), (E // R, D, D), (T, D))
    )
    prob = torch.rand(T, K, generator=g)
    for t in (x, prob, w1, w2):
        t.requires_grad_()
    idx = torch.rand(T, E, generator=g).topk(K).indices.int()
    with Watch(recorder):
        received = transport.dispatch(x, idx, prob)
        spec = MLPSpec(Activation("swiglu"), "reference", recipe=recipe)
        out_ND = experts(received, MLPWeights(w1, w2), spec)
        if beside:
            with pytest.raises(RuntimeError, match="sums of experts have another reader"):
                transport.send_sums(out_ND.view_as(out_ND), received)
        out = transport.combine(out_ND, received)
        del out_ND
        assert not beside or recorder.made() is None  # what fc2 made is not kept for backward
        torch.autograd.grad(out, [x, prob, w1, w2], torch.ones(T, D, dtype=dtype))
    model = Program(R, overlaps=overlaps)
    forward(model, overlaps=beside, keep=keep)
    backward(model, overlaps=beside, keep=keep)
    assert recorder.calls == model.calls
