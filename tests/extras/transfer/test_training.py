"""Runs of the trainer with rates of another width."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.runs import TINY, exact, records, run, with_corpus

pytestmark = pytest.mark.dist

MUP = "model.variants=[mup:16]"  # of 32 channels
FP32 = ["precision=fp32", "data.micro_batch=2", "parallel.capacity_factor=8", "optim.lr=4e-3"]


def _begun(given: list[list[str]]) -> list[tuple[dict[str, Any], list[dict[str, Any]], float]]:
    """(initial weights, groups of the optimizer with names, logged rate) of configurations."""
    from phalanx.configs.load import load
    from phalanx.moe.run.setup import setup
    from phalanx.parallel.megatron.updated import parts, updated
    from phalanx.parallel.runtime import start

    runtime, found = start(seed=1, timeout=60, deterministic=False), []
    for overrides in given:
        engine = setup(load(overrides), runtime).engine
        engine.scheduler.step(2)
        named = dict(engine.modules[0].named_parameters())
        names = {id(p): name for name, p in named.items()}
        groups = []
        for part in parts(engine.optimizer):
            of = {id(u.main): names[id(u.parameter)] for u in updated(part)}
            for group in part.optimizer.param_groups:
                fields = {k: v for k, v in group.items() if k != "params"}
                groups.append(fields | {"names": [of[id(p)] for p in group["params"]]})
        weights = {name: p.detach().clone() for name, p in named.items()}
        found.append((weights, groups, engine.lr))
    return found


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_initial_weights_and_groups(sharded: str) -> None:
    common = [*TINY, *FP32, "optim.min_lr=1e-3", f"parallel.distributed_optimizer={sharded}"]
    (found,) = run_distributed(_begun, 1, [common, [*common, MUP]])
    (plain, groups, _), (mup, of_mup, rate) = found
    assert {g["max_lr"] for g in groups} == {4e-3} and rate == 4e-3
    due = {"linear_": 2**-0.5, ".w1": 2**-0.5, ".w2": 2**-0.5, "router": 0.5, "embedding": 1}
    due |= {"output_layer": 1, "final_layernorm": 0.5, "layernorm": 1}
    for name, weight in mup.items():
        factor = next(f for part, f in due.items() if part in name)
        assert (weight - factor * plain[name]).abs().max() < 1e-7, name
    seen = set()
    for group in of_mup:
        for name in group["names"]:
            fixed = "embedding" in name or "output_layer" in name
            norm, last = "norm" in name, "final_layernorm" in name
            slow = last or not (fixed or norm)
            assert group["max_lr"] == 4e-3 * (0.5 if slow else 1), name
            assert group["min_lr"] == 1e-3 * (0.5 if slow else 1), name
            assert group["wd_mult"] == (0 if norm else 2 if slow else 1), name
            assert group["eps"] == 1e-8 * (1 if last or "router" in name else 0.5), name
            assert group["lr"] * (2 if slow else 1) == rate
            seen.add(name)
    assert seen == set(mup)


def test_at_the_width_of_the_base_a_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    found = []
    for name, variants in (("a", "[]"), ("b", "[mup:32]")):
        command = [*TINY, f"model.variants={variants}", "run.steps=3", f"run.dir={tmp_path / name}"]
        (ended,) = run(1, command)
        assert ended.code == 0, ended.err
        found.append(exact(records(tmp_path / name / "run")))
    assert found[0] == found[1]


LAYOUTS = {
    "experts": ["parallel.expert=2"],
    "tensor": ["parallel.tensor=2"],
    "stages": ["parallel.pipeline=2"],
    "host": ["optim.moments=fp32_host"],
    "zero3": ["parallel.distributed_optimizer=zero3"],
}
OF_ADAMW = ("zero3",)


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_losses_do_not_depend_on_the_layout(optim: str, tmp_path: Path) -> None:
    common = [*TINY, MUP, *FP32, f"optim.kind={optim}", "model.tie_embeddings=true"]
    common += ["run.steps=3", "optim.warmup_steps=0", "model.moe.shared_ffn=16"]
    found = {}
    layouts = {k: v for k, v in LAYOUTS.items() if optim == "adamw" or k not in OF_ADAMW}
    for name, more in {"one": [], **layouts}.items():
        ranks = run(2 if more else 1, [*common, *more, f"run.dir={tmp_path / name}"])
        assert {r.code for r in ranks} == {0}, ranks[0].err
        found[name] = records(tmp_path / name / "run")
        if not more:
            assert "widths" in ranks[0].out and "rates are of width 16" in ranks[0].out
    for name in layouts:
        for key, rel in (("loss", 2e-5), ("grad_norm", 2e-3)):
            want = [r[key] for r in found["one"]]
            assert [r[key] for r in found[name]] == pytest.approx(want, rel=rel), name


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_run_goes_on_bit_for_bit(optim: str, tmp_path: Path) -> None:
    """In bf16 with bf16 moments: 8 steps, and the last 4 of them again; `lr` is the base's."""
    command = [*TINY, MUP, *with_corpus(tmp_path), f"optim.kind={optim}", "optim.moments=bf16"]
    command += ["run.steps=8", "run.save_interval=4", "optim.ema=0.9"]
    (main,) = run(1, [*command, f"run.dir={tmp_path / 'a'}"])
    assert main.code == 0, main.err
    saved = tmp_path / "a/run/checkpoints/step_00000004"
    (again,) = run(1, [*command, f"run.dir={tmp_path / 'b'}", f"run.resume={saved}"])
    assert "resumed from step 4" in again.out, again.err
    straight, repeated = (records(tmp_path / x / "run") for x in "ab")
    assert len(straight) == 8 and exact(straight)[4:] == exact(repeated)
    assert straight[1]["lr"] == 1e-2  # after the warm-up
    (other,) = run(
        1,
        [
            *(word for word in command if word != MUP),
            f"run.dir={tmp_path / 'c'}",
            f"run.resume={saved}",
        ],
    )
    assert other.code != 0 and "model.variants" in other.err


def test_layers_of_megatron_core_have_the_rules_too(tmp_path: Path) -> None:
    given = ["kernels=megatron", "model.bias=true", "model.mtp_layers=1", "run.steps=1"]
    (ended,) = run(1, [*TINY, MUP, *given, f"run.dir={tmp_path}"])
    assert ended.code == 0, ended.err
