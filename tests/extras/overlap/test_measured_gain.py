"""Overlap of micro-batches in estimates, beside measured steps."""

from pathlib import Path

import pytest

from phalanx.configs.knobs import changed
from phalanx.configs.load import load
from phalanx.configs.tables.machines import machine_named
from phalanx.extras.overlap.gain import overlap_effect
from phalanx.moe.plan.cost.exchange import WAITING_COST, own_exchange
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved
from phalanx.moe.plan.resolve import microbatch_overlap
from tests.moe.plan.cost.test_delayed_wgrad import (
    ATTENTION,
    IN_TURN,
    NVLINK,
    OVERLAP,
    PASSES,
    TOKENS,
    WIRE,
    WORLD,
    _machines_as_they_were,  # noqa: F401 - a fixture
    known,
    seconds,
)


def test_steps_over_the_wire_are_as_much_shorter_as_measured() -> None:
    """Beside a step with weight gradients beside exchanges (docs/measured/training)."""
    ratio = seconds(WIRE, f"{OVERLAP}=on") / seconds(WIRE, IN_TURN)
    assert ratio == pytest.approx(0.307 / 0.330, rel=0.015)


def test_a_step_of_deepseek_v3_is_as_much_longer_over_the_wire_as_measured(tmp_path: Path) -> None:
    """Than one without exchanges, on two H200s (docs/measured/training/overlap_h200s.md)."""
    model = [
        *("model=deepseek_v3", "model.layers=3", "model.moe.dense_layers=0", "model.mtp_layers=0"),
        *("model.vocab_size=32768", "model.moe.router.groups=1", "model.moe.router.group_topk=1"),
        *("model.moe.router.force_balance=true", "data=synthetic", "data.sequence_length=4096"),
        *("data.micro_batch=1", "optim.moments=bf16", f"{OVERLAP}=on"),
    ]
    (tmp_path / "wire.yaml").write_text("kind: h200\nnode_gpus: 1\nnetwork_gbs: 50\nlatency_us: 20")
    model.append(f"run.machine={tmp_path}/wire.yaml")
    wire = machine_named(f"{tmp_path}/wire.yaml")
    alone = ["model.moe.experts=16", "data.global_batch=32", f"{OVERLAP}=off"]
    wired = ["model.moe.experts=32", "data.global_batch=64", "parallel.dispatch=hier"]
    one, two = (
        step_time(resolved(load([*model, *more, f"parallel.expert={n}"]), n, 1), n, wire).total
        for n, more in ((1, alone), (2, wired))
    )
    assert two / one == pytest.approx(102.67 / 98.08, rel=0.015)


def test_auto_overlaps_micro_batches_over_the_wire_and_not_over_nvlink() -> None:
    saved = {}
    for name, machine, value in (("wire", WIRE, "on"), ("NVLink", NVLINK, "off")):
        assert known(machine).parallel.overlap_microbatches == value
        cfg = changed(known(machine, IN_TURN), {OVERLAP: "auto"})
        assert microbatch_overlap(cfg, WORLD, machine, machine.room)[0] == value
        saved[name] = overlap_effect(cfg, WORLD, machine).saved
    assert saved["wire"] == pytest.approx(1 - 0.307 / 0.330, abs=0.01)
    assert 0 < saved["NVLink"] < 0.02


def test_with_overlap_the_first_forward_and_the_rest_of_the_last_backward_pass_are_exposed() -> (
    None
):
    sent = own_exchange(known(WIRE, f"{OVERLAP}=on"), WORLD, WIRE)
    step = step_time(known(WIRE, f"{OVERLAP}=on"), WORLD, WIRE)
    exposed = PASSES / 8 * TOKENS * (sent.forward + sent.backward)
    assert step.exchange == pytest.approx(WAITING_COST * exposed)
    assert sent.backward == pytest.approx(sent.forward / 2 - ATTENTION)
