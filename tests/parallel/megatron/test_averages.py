"""Averages of weights: their values, what they do not change, and checkpoints without them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.configs.schema import Config
from phalanx.moe.plan.cost.weights import stage_weights
from tests.parallel.checkpoint.checkpoints import (
    build,
    checkpointer,
    load,
    save,
    stored,
    tensors,
    train,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow, slow

DECAY = 0.75
"""A decay that is exact in fp32, as is the rest."""


def masters(engine: Any) -> list[torch.Tensor]:
    """Copies in fp32 of all that is updated on this rank."""
    from phalanx.kernels.elementwise.adam import merged
    from phalanx.parallel.megatron.updated import parts, updated

    found = []
    for part in parts(engine.optimizer):
        for each in updated(part):
            main = each.main.detach().reshape(-1)
            rest = part.optimizer.state[each.main].get("remainder")
            found.append(main.float().clone() if rest is None else merged(main, rest.view(-1)))
    return found


def averages(engine: Any) -> list[torch.Tensor]:
    from phalanx.parallel.megatron.updated import parts, updated

    held = [
        part.optimizer.state[each.main]["ema"]
        for part in parts(engine.optimizer)
        for each in updated(part)
    ]
    assert held and all(ema.dtype == torch.float32 for ema in held)
    return [ema.reshape(-1).clone() for ema in held]


def _values(kw: dict[str, Any]) -> None:
    engine, groups = build(ema=DECAY, **kw)
    plain, _ = build(**kw)
    expected = masters(engine)
    assert all(map(torch.equal, averages(engine), expected))
    for step in range(3):
        assert train(engine, groups, step, step + 1) == train(plain, groups, step, step + 1)
        pairs = zip(expected, masters(engine), strict=True)
        expected = [DECAY * old + (1 - DECAY) * new for old, new in pairs]
        for actual, wanted in zip(averages(engine), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-8)
    engine.skip()
    for actual, wanted in zip(averages(engine), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-8)
    with_averages, without = tensors(engine), tensors(plain)
    assert {n for n in with_averages if not n.startswith("ema ")} == set(without)
    assert all(torch.equal(with_averages[name], value) for name, value in without.items())


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "kw"),
    [
        (1, {}),
        (1, {"bf16": False, "distributed_optimizer": False}),
        (1, {"kind": "muon", "moments": "bf16"}),
        (2, {"expert": 2}),
        *slow((2, {"moments": "bf16"}), (2, {"kind": "muon"})),
        *slow((2, {"distributed_optimizer": False})),
    ],
)
def test_averages_follow_the_master_weights_and_change_nothing(
    world: int, kw: dict[str, Any]
) -> None:
    run_distributed(_values, world, kw)


def _begins(folder: Path, kw: dict[str, Any]) -> None:
    engine, groups = build(**kw)
    train(engine, groups, 0, 2)
    checkpoints = checkpointer(folder, groups)
    path = save(checkpoints, 2, engine)
    later, groups = build(seed=2, ema=DECAY, **kw)
    train(later, groups, 0, 1)
    load(checkpointer(folder, groups), path, later)
    assert all(map(torch.equal, averages(later), masters(engine)))
    assert train(later, groups, 2, 4) == train(engine, groups, 2, 4)


@pytest.mark.dist
@mostly_slow("kw", [{}, {"moments": "bf16"}, {"bf16": False}], {"moments": "bf16"})
def test_a_checkpoint_without_averages_begins_them(tmp_path: Path, kw: dict[str, Any]) -> None:
    run_distributed(_begins, 2, tmp_path, kw)


def _leaves_out(folder: Path) -> None:
    engine, groups = build(ema=DECAY)
    train(engine, groups, 0, 2)
    path = save(checkpointer(folder, groups), 2, engine)
    later, groups = build(seed=2)
    load(checkpointer(folder, groups), path, later)
    assert train(later, groups, 2, 4) == train(engine, groups, 2, 4)


@pytest.mark.dist
def test_a_run_without_averages_goes_on_from_one_with_them(tmp_path: Path) -> None:
    run_distributed(_leaves_out, 1, tmp_path)


def _saved(folder: Path, kw: dict[str, Any]) -> None:
    engine, groups = build(ema=DECAY, **kw)
    train(engine, groups, 0, 2)
    save(checkpointer(folder, groups), 2, engine)


def _moved(folder: Path, kw: dict[str, Any]) -> None:
    engine, groups = build(seed=2, ema=DECAY, **kw)
    load(checkpointer(folder, groups), folder / "step_00000002", engine)
    save(checkpointer(folder / "moved", groups), 2, engine)


@pytest.mark.dist
def test_averages_move_between_layouts(tmp_path: Path) -> None:
    run_distributed(_saved, 2, tmp_path, {"expert": 2})
    run_distributed(_moved, 1, tmp_path, {"distributed_optimizer": False})
    before, after = (stored(tmp_path / d / "step_00000002") for d in (".", "moved"))
    held = {name for name in before if name.startswith("optimizer.state.ema.")}
    assert {n.removeprefix("optimizer.state.ema.") for n in held} == {
        n.removeprefix("optimizer.state.exp_avg.")
        for n in before
        if n.startswith("optimizer.state.exp_avg.")
    }
    assert all(torch.equal(before[name], after[name]) for name in held)


def _is_asked() -> None:
    from phalanx.parallel.megatron.updated import has_averages, parts

    engine, _ = build()
    assert not has_averages(engine.optimizer)
    assert all(len(part.optimizer.state) == 0 for part in parts(engine.optimizer))
    assert has_averages(build(ema=DECAY)[0].optimizer)


@pytest.mark.dist
def test_an_optimizer_that_is_asked_for_averages_gets_no_state() -> None:
    """The state of a resumed run would be in another order than that of one that went on."""
    run_distributed(_is_asked, 1)


def test_the_estimate_counts_averages() -> None:
    cfg = Config()
    without = stage_weights(cfg, 1)[0].optimizer_bytes
    cfg.optim.ema = 0.999
    moments_and_master = stage_weights(cfg, 1)[0].optimizer_bytes
    assert moments_and_master * 12 == without * 16, "AdamW has 12 bytes a parameter without"
