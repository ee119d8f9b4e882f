"""Replica memory over `symm` needs no flags: `symm` makes the model's calls, which can fail."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.extras.replication import transfers
from phalanx.extras.replication.options import ReplicationOptions
from phalanx.extras.replication.symm import PushedReplicas
from phalanx.extras.replication.transfers import HIDDEN
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Fp8Block
from tests.extras.replication.gloo_replicas import (
    GlooReplicaMemory,
    GlooUnreducedMemory,
    replicating,
)
from tests.extras.replication.protocol import (
    Program,
    backward,
    forward,
    way_back,
)
from tests.extras.replication.test_replication import layer, problem
from tests.extras.replication.test_symm import WAYS, dispatcher_of
from tests.parallel.dispatcher.gloo_exchange import GlooExchange, gloo_exchanges
from tests.parallel.dispatcher.protocol import Violation, explore
from tests.support.distributed import run_distributed


def stepped(ranks: int, overlaps: bool, keep: bool, fp8: bool = False) -> Program:
    """Two steps of two layers, the second with two micro-batches under way and one evaluation."""
    p = Program(ranks, overlaps=overlaps)
    for micro_batches in (1, 2):
        for _ in range(2 * micro_batches):
            forward(p, overlaps=overlaps)
        for _ in range(2 * micro_batches):
            backward(p, overlaps=overlaps, keep=keep, fp8=fp8)
    forward(p, overlaps=overlaps)
    forward(p, overlaps=overlaps)
    return p


@pytest.mark.parametrize(("ranks", "runs"), [(2, 25), (3, 8), (4, 3)])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_no_order_of_events_breaks_it(overlaps: bool, keep: bool, ranks: int, runs: int) -> None:
    explore(stepped(ranks, overlaps, keep), runs)


@pytest.mark.parametrize(("ranks", "runs"), [(2, 50), (3, 15)])
def test_nor_where_tokens_in_fp8_are_kept_and_weights_sent_again(ranks: int, runs: int) -> None:
    explore(stepped(ranks, overlaps=False, keep=False, fp8=True), runs)


def _without_a_way_out(p: Program) -> None:
    way_back(p)
    way_back(p)


def _without_gradients_of_sums(p: Program) -> None:
    for _ in range(2):
        backward(p, overlaps=True, keep=True, meets=False)


def _without_a_signal(p: Program) -> None:
    backward(p, overlaps=True, keep=True, signal=False)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_without_a_way_out, "writes rows that rank . still reads"),
        (_without_gradients_of_sums, "writes (gradients fc.|rows) that rank . still reads"),
        (_without_a_signal, "reads gradients fc. that rank . has not written"),
    ],
)
def test_what_orders_it_is_needed(broken: Callable[[Program], None], message: str) -> None:
    p = Program(2, overlaps=True)
    broken(p)
    with pytest.raises(Violation, match=message):
        explore(p, 300)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Calls of the host, in the words of the model."""
    calls: list[str] = []

    def note(owner: Any, name: str, what: str, control: str = "") -> Any:
        method = getattr(owner, name)

        def called(*given: Any, **how: Any) -> Any:
            of_control = control and given[0]._places.shape[-1] == HIDDEN
            if said := control if of_control else what:
                calls.append(said.format(*given[1:2]))
            return method(*given, **how)

        return mock.patch.object(owner, name, called)

    with ExitStack() as stack:
        for patch in (
            note(GlooExchange, "start", "start", "signal"),
            note(GlooExchange, "send_sums", "start"),
            note(GlooExchange, "send_gradient", "start"),
            note(GlooExchange, "wait", "", "wait"),
            note(GlooUnreducedMemory, "send", "put rows"),
            note(GlooReplicaMemory, "send_weights", "send weights"),
            note(GlooReplicaMemory, "wait", "wait for replicas"),
            note(PushedReplicas, "send_grads", "put gradients {}"),
            note(GlooReplicaMemory, "reduce_grads", "get gradients {}"),
            note(transfers, "sum_unreduced_rows", "get rows"),
        ):
            stack.enter_context(patch)
        yield calls


def _calls(sms: int, keep: bool, fp8: bool) -> list[str]:
    """Calls in two micro-batches of a layer."""
    recipe = Fp8Block() if fp8 else None
    spec = MLPSpec(Activation("swiglu"), "reference", accumulate=True, recipe=recipe)
    with gloo_exchanges(replicating), noted() as calls:
        dispatcher = dispatcher_of(
            "symm", ReplicationOptions(2, 10, keep), sms, keep, spec, fp8_rows=fp8
        )
        layer(problem("one hot expert", torch.bfloat16), dispatcher, spec)
    return calls


@pytest.mark.dist
@pytest.mark.parametrize(("sms", "keep"), WAYS)
@pytest.mark.parametrize("fp8", [False, True])
def test_the_model_says_what_symm_does(fp8: bool, sms: int, keep: bool) -> None:
    model = Program(2, overlaps=sms > 0)
    for _ in range(2):
        forward(model, overlaps=sms > 0)
        backward(model, overlaps=sms > 0, keep=keep, fp8=fp8)
    for calls in run_distributed(_calls, 2, sms, keep, fp8):
        assert calls == model.calls
