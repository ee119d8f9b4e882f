"""Weight gradients beside exchanges in estimates: the exposed part, beside measured steps."""

from collections.abc import Iterator
from dataclasses import replace
from math import hypot

import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES, Machine
from phalanx.moe.plan.cost.exchange import WAITING_COST, own_exchange
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved
from tests.extras.planner.pages import RUN, STEP, section

WORLD, TOKENS, PASSES = 2, 4096, 8 * 6
"""Ranks, tokens of a micro-batch, and MoE layers of all micro-batches of a step."""
MODEL = [
    *["model=qwen3_30b_a3b", "model.layers=6", "model.moe.experts=32", "run.machine=h100"],
    *["data=synthetic", f"data.sequence_length={TOKENS}", "data.micro_batch=1"],
    *["data.global_batch=16", "parallel.expert=2", "parallel.dispatch=alltoall"],
    *["model.moe.router.force_balance=true", "optim.moments=bf16"],
]
OFF, OVERLAP = "parallel.delay_wgrad=off", "parallel.overlap_microbatches"
IN_TURN = f"{OVERLAP}=off"
NVLINK = MACHINES["h100"]
WIRE = replace(NVLINK, node_gpus=1, network_gbs=50.0)
"""The machine of PHALANX_NODE_GPUS=1 PHALANX_WIRE=50e9,20e-6."""
ATTENTION = 6 * 2048 * (2 * 4096 + 2 * 512) / 3 / (NVLINK.dense_tflops * 1e12)
EXPERTS = hypot(
    6 * 8 * 3 * 2048 * 768 / 3 / (NVLINK.expert_tflops * 1e12),
    16 * 3 * 2048 * 768 * 8 / TOKENS / (NVLINK.memory_gbs * 1e9),  # fp32 sums of local experts
)
"""Seconds of a token's weight gradients in a layer."""


@pytest.fixture(autouse=True)
def _machines_as_they_were() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MACHINES, "h100", NVLINK)
        yield


def known(machine: Machine, *overrides: str) -> Config:
    MACHINES["h100"] = machine
    return resolved(load([*MODEL, *overrides]), WORLD, machine.node_gpus)


def seconds(machine: Machine, *overrides: str) -> float:
    """A step without the reduction of gradients, which the pretended wire does not slow."""
    step = step_time(known(machine, *overrides), WORLD, machine)
    return step.total - step.gradients


@pytest.mark.parametrize(
    ("machine", "overrides", "measured"),
    [  # docs/measured/training/pipelines_two_h100s.md
        (WIRE, [IN_TURN, OFF], 0.349),
        (NVLINK, [IN_TURN], 0.308),
        (NVLINK, [IN_TURN, OFF], 0.311),
    ],
)
def test_steps_are_as_much_longer_as_measured(
    machine: Machine, overrides: list[str], measured: float
) -> None:
    """Beside a step over the wire in turn, with weight gradients beside exchanges."""
    ratio = seconds(machine, *overrides) / seconds(WIRE, IN_TURN)
    assert ratio == pytest.approx(measured / 0.330, rel=0.015)


@pytest.mark.parametrize("gbs", [1.0, 50.0, 100.0, 1000.0])
@pytest.mark.parametrize("recompute", ["[]", "[moe]"])
def test_only_what_is_longer_than_the_weight_gradients_is_exposed(
    gbs: float, recompute: str
) -> None:
    """The experts' hide gradients of tokens, attention's the first exchange of a layer."""
    machine, setting = replace(WIRE, network_gbs=gbs), f"run.recompute={recompute}"
    beside, at_once = (
        own_exchange(known(machine, setting, *more), WORLD, machine)
        for more in ([IN_TURN], [IN_TURN, OFF])
    )
    each = at_once.forward / 2  # of dispatch, combine and their gradients
    assert each == pytest.approx((1 - 1 / 2**8) * 2 * 2048 / gbs / 1e9, rel=0.01)
    assert beside.forward == at_once.forward
    assert at_once.backward == pytest.approx(each * (4 if recompute == "[moe]" else 2))
    exposed = max(0, each - ATTENTION) + max(0, each - EXPERTS)
    exposed += at_once.backward - 2 * each
    assert beside.backward == pytest.approx(exposed, abs=1e-15)
    step = step_time(known(machine, setting, IN_TURN), WORLD, machine)
    assert step.exchange == pytest.approx(WAITING_COST * PASSES * TOKENS * (2 * each + exposed))


def test_pairs_hide_the_gradients_of_tokens_in_every_second_pass() -> None:
    machine = replace(WIRE, network_gbs=20.0)
    pairs = "parallel.delay_wgrad=pairs"
    alone, together = (
        own_exchange(known(machine, IN_TURN, *more), WORLD, machine) for more in ([], [pairs])
    )
    each = alone.forward / 2
    assert EXPERTS < each < 2 * EXPERTS
    assert together.backward == pytest.approx(each - ATTENTION + each / 2)
    assert alone.backward == pytest.approx(each - ATTENTION + each - EXPERTS)


def test_the_page_says_what_hides_exchanges() -> None:
    MACHINES["h100"] = WIRE
    beside = "alltoall exchanges of the backward pass overlapped with weight gradients"
    text = section((RUN, STEP), *MODEL, IN_TURN, world=WORLD)
    assert beside in text and "\n  wgrads    beside exchanges of the backward pass\n" in text
    text = section((RUN, STEP), *MODEL, IN_TURN, OFF, world=WORLD)
    assert "alltoall exchanges not overlapped with experts" in text and "wgrads  " not in text
